"""/v1/pipelines: submit a training job as a run of a pipeline.

The asset graph defines the steps. `POST /v1/jobs` has more options. Unsupported requests are refused with the alternatives.
"""

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from api.auth.permissions import Permission
from api.dependencies import CallerDep, DatabaseDep, FromOwnUserDep, SettingsDep, StoreDep
from api.idempotency import JobIdFromKey
from api.json_bodies import TypedResponse, json_response
from api.routing import Router
from api.schemas.v1.jobs import PipelineRun, job_json
from recipes.contracts.recipe import Recipe
from resources.errors import invalid
from resources.jobs.submission import NewJob, Submitter, queue_training
from resources.metadata.jobs import Jobs

router = Router("/v1/pipelines", tag="v1", alias_prefix="/api/v1/pipelines")


class PipelineConfig(BaseModel):
    """Runs the recipe `model_type`; by default the model definition of the pipeline's name."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    data_source: str | None = None
    model_type: str | None = None
    hyperparams: dict[str, JsonValue] = {}
    resources: dict[str, JsonValue] = {}


class NewPipelineRun(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    pipeline_id: str = Field(min_length=1)
    config: PipelineConfig = PipelineConfig()


@router.post("/runs", Permission.JOBS_SUBMIT, creates_model=True, status_code=201, alias=True)
def run(
    body: NewPipelineRun,
    database: DatabaseDep,
    store: StoreDep,
    settings: SettingsDep,
    caller: CallerDep,
    from_own_user: FromOwnUserDep,
    new_job_id: JobIdFromKey,
) -> TypedResponse[PipelineRun]:
    """Queue a training job named `pipeline_id`, like the model that it creates.

    A repeated Idempotency-Key returns the existing job, and ignores the body.
    """
    known = Jobs(database).find_by_id(new_job_id)
    submitter = Submitter(caller.user_id, caller.organization, from_own_user)
    job = known or queue_training(as_job(body), database, store, settings, submitter, new_job_id)
    return json_response({"run_id": job.id, "job_id": job.id, "pipeline_id": job.name, **job_json(job)}, 201)


def as_job(body: NewPipelineRun) -> NewJob:
    """Convert a pipeline run to a job; refuse unknown recipes and data sources."""
    name, config = body.pipeline_id, body.config
    if config.data_source is not None and "/" in config.data_source:
        raise invalid(
            f"config.data_source {config.data_source[:200]!r} is not a dataset: create a version of it with `hanzo-ml "
            "dataset create --name NAME --path ADDRESS` (POST /v1/datasets), and give NAME or NAME@VERSION"
        )
    if config.resources and "hardware" in config.hyperparams:
        raise invalid("config.resources and the hyperparameter `hardware` mean the same: give one of them")
    parameters = {**config.hyperparams, **({"hardware": config.resources} if config.resources else {})}
    if config.model_type is None:
        return NewJob(name=name, model=name, dataset=config.data_source, parameters=parameters)
    if config.model_type not in Recipe.names():
        raise invalid(
            f"there is no recipe for the model type {config.model_type[:100]!r}: config.model_type must be one of "
            f"{', '.join(Recipe.names())}; to run your own program, use `POST /v1/jobs` with a `command`"
        )
    if config.data_source is None:
        raise invalid("config.data_source is missing: give the dataset to train on, as NAME or NAME@VERSION")
    return NewJob(name=name, dataset=config.data_source, recipe=config.model_type, parameters=parameters)
