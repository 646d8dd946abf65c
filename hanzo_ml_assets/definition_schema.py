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
    """The resources of the program `prepare`."""

    resources: Hardware = Field(Hardware(cpu=1), description="of one pod; it runs one process per processor")
    workers: int = Field(1, ge=1, le=MAX_COUNT, description="pods that share the work on a cluster")


class DatasetDefinition(FrozenModel):
    """A dataset: the source of its files, their contract, and how they are split."""

    name: str
    description: str = ""
    source: str | None = Field(
        None,
        description="file or folder, relative to the definition, or an s3:// or kafka:// address; unset for uploads",
    )
    sql: str | None = Field(None, description="query on `database` whose rows are the records, instead of a source")
    database: str | None = Field(None, description="name in storage.databases of the settings")
    format: FormatName = "jsonl"
    contract: Contract = Contract()
    measures: Measures = Measures()
    checks: Checks = Checks()
    leak_similarity: NearDuplicates = Field(NearDuplicates(), description="when a test record nearly equals a trained one")
    split: SplitParameters = SplitParameters()
    prepare: PrepareParameters | None = Field(None, description="how `prepared` is made from a version")
    preparation: Preparation = Preparation()
    resources: Hardware = Field(Hardware(), description="for checking and splitting a version")
    owners: tuple[str, ...] = ()

    @model_validator(mode="after")
    def validate_source(self) -> Self:
        if (self.sql is None) != (self.database is None):
            raise ValueError("sql and database belong together: give a query and the name of its database, or none")
        if self.sql is not None and (self.source is not None or self.format != "jsonl"):
            raise ValueError("a definition with sql cannot have source or format: remove those")
        return self


class EvaluationSuite(FrozenModel):
    """How a tuned model is evaluated, and on which hardware."""

    resources: Hardware | None = Field(None, description="as the recipe's when unset")

    max_new_tokens: int = Field(24, ge=1)
    samples: int | None = Field(None, ge=1)
    questions: tuple[str, ...] = Field((), description="shown with the answers of both models, not scored")


class Export(FrozenModel):
    """The resources for converting an accepted version."""

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
        """Return the registry key of a job's model, which a sandbox job names itself."""
        return ModelKey(job.organization, registered_name(self.name, job.name))
