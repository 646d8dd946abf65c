"""The job that compute is handed for a plan: the program train, with what it reads, where it writes, and on what it runs."""

from pydantic import JsonValue

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.training_plan import Plan
from recipes.contracts.job import Job, Program, Tracking
from recipes.storage import uris
from recipes.storage.manifest import Artifact
from resources.hpo.sweeps import START_KEY
from resources.lineage.run_record import RunRecord
from resources.metadata.jobs import JobRecord


def training_job(plan: Plan, control_plane: ControlPlane) -> Job:
    """What compute is handed. Raises BadConfiguration: the recipe cannot be trained on as many GPUs as are asked for."""
    run_id, recipe, resumed = plan.record.run_id, plan.record.recipe, plan.job.resumed
    shape = recipe.on(resumed.gpus) if resumed.gpus else recipe
    return Job(
        id=run_id,
        program=Program.TRAIN,
        inputs={
            "run": plan.run,
            "train": plan.splits["train"],
            "validation": plan.splits["validation"],
            **start_of(plan.job),
        },
        parameters={"recipe": recipe.model_dump(mode="json")} | repeats_of(plan.record) | sent_back_of(plan.job),
        outputs={
            "checkpoints": uris.run_checkpoints(run_id),
            recipe.trained_role: uris.final_checkpoint(run_id, recipe.trained_role),
        },
        result_uri=uris.run_result(run_id, "train"),
        store=control_plane.settings.store,
        cache_dir=control_plane.cache_dir,
        tracking=Tracking(uri=control_plane.settings.tracking_uri, run_id=run_id),
        hardware=plan.record.hardware.model_copy(update={"gpus": shape.hardware.gpus}),
        distributed=shape.distributed,
        checkpoint=recipe.checkpoint.under(plan.job.schedule),
        schedule=plan.job.schedule,
    )


def repeats_of(record: RunRecord) -> dict[str, JsonValue]:
    """The parameter of a replay. Jobs that repeat nothing keep their digests."""
    return {"repeats": [incident.model_dump(mode="json") for incident in record.repeats]} if record.repeats else {}


def sent_back_of(job: JobRecord) -> dict[str, JsonValue]:
    """A part of the work: what the program had made before it was sent back is no result of this."""
    back = job.resumed.sent_back
    return {"sent_back": [each.model_dump(mode="json") for each in back]} if back else {}


def start_of(job: JobRecord) -> dict[str, Artifact]:
    """The weights that a run starts from where it is given any: those of another trial of its sweep."""
    return {START_KEY: Artifact.model_validate(job.config[START_KEY])} if START_KEY in job.config else {}
