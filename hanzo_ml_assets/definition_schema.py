"""The schema of `defs.yaml` for datasets and models."""

from typing import Literal, Self

from pydantic import Field, model_validator

from hanzo_ml_assets.gate import GatePolicy
from recipes.contracts.dataset_contract import Contract, Measures
from recipes.contracts.dataset_formats import FormatName
from recipes.contracts.frozen_model import FrozenModel
from recipes.contracts.job import MAX_COUNT, Hardware
from recipes.contracts.parameters import NearDuplicates, PrepareParameters, SplitParameters
from resources.datasets.check_policy import Checks
from resources.jobs.sandbox import registered_name
from resources.metadata.jobs import JobRecord
from resources.metadata.registry.model_names import ModelKey


class Preparation(FrozenModel):
    """What `prepare` runs on."""

    resources: Hardware = Field(Hardware(cpu=1), description="of one pod; as many processes as it has processors")
    workers: int = Field(1, ge=1, le=MAX_COUNT, description="pods that share the work, on a cluster")


class DatasetDefinition(FrozenModel):
    """A dataset: where its raw files lie, what they must be, and how they are split."""

    name: str
    description: str = ""
    source: str | None = Field(
        None,
        description="file or folder, relative to the definition, or an s3:// or kafka:// address; none where it is uploaded",
    )
    sql: str | None = Field(None, description="instead of a source, a query whose rows are the records, of `database`")
    database: str | None = Field(None, description="its name in storage.databases of the settings")
    format: FormatName = "jsonl"
    contract: Contract = Contract()
    measures: Measures = Measures()
    checks: Checks = Checks()
    leak_similarity: NearDuplicates = Field(NearDuplicates(), description="when a test record is nearly one trained on")
    split: SplitParameters = SplitParameters()
    prepare: PrepareParameters | None = Field(None, description="how `prepared` is made of a version")
    preparation: Preparation = Preparation()
    resources: Hardware = Field(Hardware(), description="what a version is checked and split on")
    owners: tuple[str, ...] = ()

    @model_validator(mode="after")
    def validate_source(self) -> Self:
        if (self.sql is None) != (self.database is None):
            raise ValueError("sql and database belong together: give a query and the name of its database, or none")
        if self.sql is not None and (self.source is not None or self.format != "jsonl"):
            raise ValueError("the rows of sql have no source and no format beside: leave those out")
        return self


class EvaluationSuite(FrozenModel):
    """What the tuned model is asked, and on which machine."""

    resources: Hardware | None = Field(None, description="as the recipe's when unset")

    max_new_tokens: int = Field(24, ge=1)
    samples: int | None = Field(None, ge=1)
    questions: tuple[str, ...] = Field((), description="shown with the answers of both models, not scored")


class Export(FrozenModel):
    """What an accepted version is converted on."""

    resources: Hardware | None = Field(None, description="as the recipe's when unset")


class DeploymentTarget(FrozenModel):
    """How a promoted version is served."""

    quantization: Literal["F16", "BF16", "Q8_0"] = "Q8_0"
    smoke_prompts: tuple[str, ...] = Field(min_length=1)


class ModelDefinition(FrozenModel):
    """A model: dataset + recipe + evaluation suite + gate + deployment target."""

    name: str
    description: str = ""
    dataset: str
    recipe: str = Field(description="name of a file in recipes/, without .yaml")
    evaluation: EvaluationSuite = EvaluationSuite()
    gate: GatePolicy = GatePolicy()
    export: Export = Export()
    deployment: DeploymentTarget
    owners: tuple[str, ...] = ()

    @property
    def partitions_name(self) -> str:
        """Name of the dynamic partitions of this model: one for each tracking run."""
        return f"{self.name}-runs"

    def key(self, step: str) -> list[str]:
        return ["models", self.name, step]

    def registry_key(self, job: JobRecord) -> ModelKey:
        """As what the registry has a job's model: under its definition's name; in the sandbox, under the job's own."""
        return ModelKey(job.organization, registered_name(self.name, job.name))
