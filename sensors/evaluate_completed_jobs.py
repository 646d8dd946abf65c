"""Evaluate, register and export the model of each completed training job.

Of a sweep only the best completed trial is used, once the sweep has ended: a model version per trial would be useless. A
trial that a user resumed later counts as an ordinary job.
"""

import dagster as dg

from hanzo_ml_assets.control_plane import ControlPlane
from resources.hpo.sweeps import SWEEP_KEY
from resources.jobs.sandbox import registered_name
from resources.metadata.jobs import TRAINING, JobRecord
from resources.metadata.outbox import Event
from resources.metadata.registry.model_names import ModelKey
from sensors.decisions.definition_lookup import find_definition
from sensors.decisions.job_runs import PRIORITY_TAG
from sensors.sensor import INTERVAL_SECONDS, read_cursor, read_new_events, sensor

EVALUATION_ASSETS = ("evaluation", "version", "merged", "gguf")
HIGH_PRIORITY = {PRIORITY_TAG: "1"}
"""Run before trainings that wait for the same GPUs; finished models once waited behind every job submitted meanwhile."""


@sensor(interval=INTERVAL_SECONDS, description="Evaluates, registers and exports each completed training run.")
def evaluate_completed_jobs(context: dg.SensorEvaluationContext, control_plane: ControlPlane) -> dg.SensorResult:
    requests = []
    with control_plane.database.read() as connection:
        cursor = read_cursor(context, connection)
        for event in read_new_events(cursor, connection, "job.completed", "sweep.completed"):
            cursor = cursor.after(event)
            of_sweep = event.type == "sweep.completed"
            job = control_plane.jobs.get(best_job_id(event) if of_sweep else event.key, connection)
            if job.type != TRAINING or job.replay_of is not None or of_sweep != is_trial(job):
                continue
            if job.status != "completed":  # every trial with a value was stopped early: no model exists yet
                continue
            home = find_definition(context, "models", str(job.config["model"]))
            model = ModelKey(job.organization, registered_name(home, job.name))
            version = control_plane.registry.find_by_training(model, job.id, connection)
            if version is not None and "gguf" in version.artifacts:
                continue
            # Requesting a partition unknown to Dagster, whose history may be new, fails the tick and blocks later jobs.
            context.instance.add_dynamic_partitions(f"{home}-runs", [job.id])
            requests.append(
                dg.RunRequest(
                    run_key=cursor.run_key(f"evaluate-{job.id}"),
                    partition_key=job.id,
                    asset_selection=[dg.AssetKey(["models", home, step]) for step in EVALUATION_ASSETS],
                    tags=HIGH_PRIORITY,
                )
            )
    return dg.SensorResult(run_requests=requests, cursor=str(cursor))


def is_trial(job: JobRecord) -> bool:
    """Whether the job is a sweep trial that was not resumed separately."""
    return SWEEP_KEY in job.config and not job.resumed.times


def best_job_id(event: Event) -> str:
    """Return the job of the best completed trial; older events only name the best trial."""
    best = event.payload.get("best_completed") or event.payload["best"]
    return str(best["job_id"])
