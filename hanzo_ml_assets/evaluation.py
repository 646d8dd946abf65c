"""The asset `evaluation`: score base, tuned and last accepted model."""

from collections.abc import Iterator
from typing import Any

import dagster as dg

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.definition_schema import ModelDefinition
from hanzo_ml_assets.failure_reason import reports_exit_reason
from hanzo_ml_assets.gate import GateVerdict, apply_gate
from hanzo_ml_assets.run_tags import asset_group_name
from hanzo_ml_assets.supervisor import SUPERVISOR_HOOKS, run_program
from recipes.contracts.job import Job, Program, Result
from recipes.contracts.results import EvaluationReport
from recipes.storage import uris
from recipes.storage.manifest import Artifact
from resources.compute.local.capacity import GPU_POOL
from resources.lineage.edges import find_artifact, parent_digests, record_artifact
from resources.lineage.run_record import read_record
from resources.metadata.field_rules import metric_point
from resources.metadata.jobs import JobRecord
from resources.metadata.tracking.run_data import RunData

GATE_CHECK = "gate"


def build_evaluation(model: ModelDefinition, partitions: dg.DynamicPartitionsDefinition) -> dg.AssetsDefinition:
    key = dg.AssetKey(model.key("evaluation"))

    @dg.asset(
        key=key,
        deps=[model.key("checkpoint"), ["datasets", model.dataset, "test"]],
        partitions_def=partitions,
        group_name=asset_group_name("models", model.name),
        kinds={"pytorch"},
        owners=list(model.owners),
        description="Scores of the base, the tuned and the last accepted model on the held-out test split.",
        # Not blocking: rejecting a model is a verdict, not a fault. The registry quarantines it with the reason.
        check_specs=[
            dg.AssetCheckSpec(
                GATE_CHECK, asset=key, description="Whether the model may go to staging. Broken rules are in the metadata."
            )
        ],
        pool=GPU_POOL,
        hooks=SUPERVISOR_HOOKS,
        code_version="1",
    )
    @reports_exit_reason
    def evaluation(
        context: dg.AssetExecutionContext, control_plane: ControlPlane
    ) -> Iterator[dg.MaterializeResult | dg.AssetCheckResult]:
        trained = control_plane.jobs.read(context.partition_key)
        if trained.status != "completed":
            raise dg.Failure(f"run {trained.id} is {trained.status}: materialize its checkpoint first")
        control_plane.jobs.start_evaluation(trained.id)
        job = evaluation_job(model, trained, control_plane)
        result = run_program(context, job, control_plane)
        report = EvaluationReport.model_validate(result.facts["report"])
        scores = {name: got.model_dump() for name, got in report.scores.items()}
        verdict = apply_gate(scores, model.gate)
        complete_evaluation(trained, result, verdict, control_plane)
        artifact = result.artifacts["evaluation"]
        yield dg.MaterializeResult(
            metadata={
                **{f"{name}_accuracy": got["accuracy"] for name, got in scores.items()},
                **{f"{name}_perplexity": got["perplexity"] or float("nan") for name, got in scores.items()},
                "report": dg.MetadataValue.md(report_table(scores, verdict)),
                "records_left_out": report.left_out,
                "answers": dg.MetadataValue.json(report.samples[:10]),
                "uri": artifact.uri,
                "digest": artifact.digest,
                "checkpoint_digest": trained.trained.digest,
            },
            data_version=dg.DataVersion(artifact.digest),
        )
        yield dg.AssetCheckResult(
            check_name=GATE_CHECK, asset_key=key, passed=verdict.accepted, metadata={"verdict": verdict.sentence}
        )

    return evaluation


def evaluation_job(model: ModelDefinition, trained: JobRecord, control_plane: ControlPlane) -> Job:
    record = read_record(control_plane.store, trained.artifact("run"))
    recipe = record.recipe
    inputs = {role: trained.artifact(role) for role in ("base", recipe.trained_role, "test")}
    if accepted := find_accepted_model(model, trained, control_plane):
        inputs["accepted"] = accepted
    place = uris.run_evaluation(trained.id)
    return Job(
        id=f"evaluate-{trained.id}",
        program=Program.EVALUATE,
        inputs=inputs,
        parameters={
            "recipe": recipe.model_dump(mode="json"),
            **model.evaluation.model_dump(mode="json", exclude={"resources"}),
        },
        outputs={"evaluation": place},
        result_uri=uris.run_result(trained.id, "evaluate"),
        store=control_plane.settings.store,
        cache_dir=control_plane.cache_dir,
        hardware=model.evaluation.resources or recipe.hardware,
        rendering=record.rendering,
        env=dict(trained.env),
        pod=trained.pod,
    )


def find_accepted_model(model: ModelDefinition, trained: JobRecord, control_plane: ControlPlane) -> Artifact | None:
    """Return the last accepted model, if it has the same base model.

    For a run that already has its version, return the model it was compared with: the verdict stays valid.
    """
    registered = model.registry_key(trained)
    with control_plane.database.read() as connection:
        if (
            trained.evaluation is not None
            and control_plane.registry.find_by_training(registered, trained.id, connection) is not None
        ):
            made_of = parent_digests(connection, trained.evaluation["artifact"]["digest"])
            return find_artifact(connection, made_of["accepted"]) if "accepted" in made_of else None
        version = control_plane.registry.last_accepted(registered, connection)
        if version is None:
            return None
        before = control_plane.jobs.get(str(version.run_id), connection)
    same_base = before.artifact("base").digest == trained.artifact("base").digest
    return before.trained if same_base else None


def complete_evaluation(trained: JobRecord, result: Result, verdict: GateVerdict, control_plane: ControlPlane) -> None:
    """Record report, metrics, lineage and event in one transaction."""
    report = result.facts["report"]
    artifact = result.artifacts["evaluation"]
    evaluation = {"report": report, "verdict": verdict.model_dump(mode="json"), "artifact": artifact.model_dump()}
    points = [metric_point(f"test/{name}", value, 0, trained.ended_at or 0) for name, value in result.metrics.items()]
    with control_plane.database.write() as connection:
        record_artifact(connection, artifact, control_plane.store.manifest(artifact))
        RunData(control_plane.database).log_batch(trained.id, metrics=points, connection=connection)
        control_plane.jobs.set_evaluation(connection, trained.id, evaluation)


def report_table(scores: dict[str, dict[str, Any]], verdict: GateVerdict) -> str:
    """Return the scores as a Markdown table, followed by the gate's verdict."""
    rows = [
        f"| {name} | {got['accuracy']:.3f} | {'not finite' if got['perplexity'] is None else round(got['perplexity'], 3)} |"
        for name, got in scores.items()
    ]
    return "\n".join(["| model | accuracy | perplexity |", "|---|---|---|", *rows, "", f"**Gate**: {verdict.sentence}"])
