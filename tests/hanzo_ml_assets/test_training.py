"""A training run keeps the settings that it was started with."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from sqlalchemy import select

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.definition_schema import ModelDefinition
from hanzo_ml_assets.dry_run import training as dry_run
from hanzo_ml_assets.training import build_checkpoint, complete_training, ensure_job, log_params
from hanzo_ml_assets.training_plan import TrainingPlan, make_training_plan, training_job
from recipes.contracts import recipe as recipes
from recipes.contracts.job import BadConfiguration, Job, Machine, Result
from recipes.contracts.pod_settings import PodSettings
from recipes.contracts.recovery_log import OutOfMemory, add_recovery_event
from recipes.contracts.results import TrainingFacts, UnsentPoint, result_folder, write_unsent_metrics
from recipes.contracts.rewind import Rewind
from recipes.storage.base_model_folder import hash_model_folder
from recipes.storage.manifest import Artifact
from recipes.training.run_setup import TrainParameters
from resources.compute.base import JobFailed
from resources.compute.local.backend import LocalCompute
from resources.installation import NO_COMMIT
from resources.metadata.field_rules import COMMIT_TAG, metric_point
from resources.metadata.job_record import ResumeHistory
from resources.metadata.jobs import JobRecord
from resources.metadata.tables import latest_metrics
from resources.metadata.tracking.experiments import DEFAULT_ORGANIZATION
from resources.metadata.tracking.metrics import Metrics
from resources.metadata.tracking.run_data import RunData
from tests.recipes.tiny_model import make_tiny_model
from tests.support.assets.dry_run_home import ASSISTANT, home

__all__ = ["home"]


def trained(id: str, config: Mapping[str, Any], control_plane: ControlPlane, folder: Path) -> tuple[TrainingPlan, Artifact]:
    """Return the plan of a running job and the adapter that it has written."""
    control_plane.jobs.submit(name="n", config=config, user="u", organization=DEFAULT_ORGANIZATION, id=id, status="running")
    (folder / "made").mkdir()
    (folder / "made" / "file").write_text("weights")
    made = control_plane.store.publish(folder / "made", f"s3://hanzo-ml/runs/{id}/adapter", "adapter")
    return make_training_plan(dry_run.load_definition("ellarin-assistant"), id, control_plane), made


def test_editing_a_recipe_file_does_not_change_started_runs(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control_plane = ControlPlane()

    def rank_of(run_id: str) -> int:
        control_plane.jobs.submit(name="n", config=ASSISTANT, user="u", organization=DEFAULT_ORGANIZATION, id=run_id)
        return make_training_plan(
            dry_run.load_definition("ellarin-assistant"), run_id, control_plane
        ).record.recipe.lora_rank

    before = rank_of("begun")
    text = (recipes.RECIPES_FOLDER / "smollm2-135m-lora.yaml").read_text()
    (tmp_path / "smollm2-135m-lora.yaml").write_text(text.replace(f"lora_rank: {before}", "lora_rank: 99"))
    monkeypatch.setattr(recipes, "RECIPES_FOLDER", tmp_path)
    assert (rank_of("begun"), rank_of("new")) == (before, 99)
    control_plane.database.close()


def test_partition_named_like_a_run_of_another_model_is_refused(home: Path) -> None:
    control_plane = ControlPlane()
    for again in range(2):
        ensure_job("first", "ellarin-assistant", {}, control_plane)
        assert control_plane.jobs.read("first").config["model"] == "ellarin-assistant", again
    with pytest.raises(
        dg.Failure, match="run first belongs to another job, 'ellarin-assistant': add a partition of another name"
    ):
        ensure_job("first", "sandbox", {}, control_plane)
    control_plane.database.close()


def test_clicked_run_continues_with_its_pinned_dataset(home: Path) -> None:
    control_plane = ControlPlane()
    for given in ({"dataset": "colours"}, {}):
        ensure_job("clicked", "sandbox", given, control_plane)
        control_plane.jobs.set_config_value("clicked", "dataset", "colours@3")
    ensure_job("clicked", "sandbox", {"dataset": "colours@3"}, control_plane)
    for other in ("colour", "colours@2"):
        with pytest.raises(dg.Failure, match="run clicked was started with other settings"):
            ensure_job("clicked", "sandbox", {"dataset": other}, control_plane)
    control_plane.database.close()


@pytest.mark.requirement("E8", "E11")
def test_the_run_of_a_job_carries_the_commit_of_its_code(home: Path) -> None:
    control_plane = ControlPlane()

    def tags_of_code(commit: str) -> list[str]:
        control_plane.jobs.submit(name="n", config=ASSISTANT, user="u", organization=DEFAULT_ORGANIZATION, id=commit)
        plan = make_training_plan(dry_run.load_definition("ellarin-assistant"), commit, control_plane)
        environment = plan.record.environment.model_copy(update={"git_commit": commit})
        log_params(replace(plan, record=plan.record.model_copy(update={"environment": environment})), control_plane)
        tags = RunData(control_plane.database).tags(commit)
        return [value for key, value in tags.items() if key == COMMIT_TAG]

    assert tags_of_code("c0ffee") == ["c0ffee"]
    assert tags_of_code(NO_COMMIT) == [], "the code lies in no checkout"
    control_plane.database.close()


def test_dataset_unsuitable_for_the_objective_is_refused_before_start(home: Path) -> None:
    """A definition's recipe and dataset are known here, before anything is written."""
    control_plane = ControlPlane()
    config = {**ASSISTANT, "parameters": {"objective": "dpo"}}
    control_plane.jobs.submit(name="n", config=config, user="u", organization=DEFAULT_ORGANIZATION, id="pairs")
    with pytest.raises(BadConfiguration, match="objective dpo cannot learn from dataset ellarin@1, whose records are"):
        make_training_plan(dry_run.load_definition("ellarin-assistant"), "pairs", control_plane)
    assert control_plane.store.find("s3://hanzo-ml/runs/pairs/record") is None
    control_plane.database.close()


def test_base_model_with_a_wrong_sha256_is_refused_before_start(home: Path, tmp_path: Path) -> None:
    """Only the program detected it, after it had been given the GPU."""
    control_plane, folder = ControlPlane(), make_tiny_model(tmp_path / "model")
    planned = {}
    for name, sha256 in (("other", "0" * 64), ("same", hash_model_folder(folder))):
        base = {"base_model": {"uri": folder.as_uri(), "sha256": sha256}}
        config = {**ASSISTANT, "parameters": {**base, "sequence_length": 64}}
        control_plane.jobs.submit(name="n", config=config, user="u", organization=DEFAULT_ORGANIZATION, id=name)
        try:
            planned[name] = make_training_plan(dry_run.load_definition("ellarin-assistant"), name, control_plane)
        except BadConfiguration as refused:
            assert f"has SHA-256 {hash_model_folder(folder)}, the recipe pins {'0' * 64}" in str(refused)
    assert list(planned) == ["same"]
    assert control_plane.store.find("s3://hanzo-ml/runs/other/record") is None
    control_plane.database.close()


def test_run_with_a_modified_record_is_refused(home: Path) -> None:
    control_plane = ControlPlane()
    control_plane.jobs.submit(name="n", config=ASSISTANT, user="u", organization=DEFAULT_ORGANIZATION, id="changed")
    plan = make_training_plan(dry_run.load_definition("ellarin-assistant"), "changed", control_plane)
    other = plan.record.model_copy(update={"dataset": "another@1"})
    control_plane.store.put_bytes("s3://hanzo-ml/runs/changed/record/run.json", other.model_dump_json().encode())
    with pytest.raises(BadConfiguration, match=r"record/run\.json was changed since the run: it has SHA-256"):
        make_training_plan(dry_run.load_definition("ellarin-assistant"), "changed", control_plane)
    control_plane.database.close()


@pytest.mark.requirement("E2", "E8")
def test_run_params_have_the_specified_names(home: Path) -> None:
    """The specification's params, and those that the job changed in addition."""
    control_plane = ControlPlane()
    changed = {"learning_rate": 2e-4, "gradient_accumulation": 4, "warmup_ratio": 0.25}
    config = {**ASSISTANT, "parameters": {**changed, "lora_target_modules": ["q_proj", "v_proj"], "eval_steps": None}}
    control_plane.jobs.submit(name="n", config=config, user="u", organization=DEFAULT_ORGANIZATION, id="named")
    plan = make_training_plan(dry_run.load_definition("ellarin-assistant"), "named", control_plane)
    log_params(plan, control_plane)
    recipe = plan.record.recipe
    assert (
        RunData(control_plane.database).params("named").items()
        >= {
            "model": recipe.base_model.uri,
            "method": "lora",
            "objective": "sft",
            "learning_rate": "0.0002",
            "batch_size": str(recipe.batch_size),
            "gradient_accumulation_steps": "4",
            "warmup_ratio": "0.25",
            "lora_target_modules": "['q_proj', 'v_proj']",
            "eval_steps": "None",
            "max_steps": str(recipe.max_steps),
            "lora_rank": str(recipe.lora_rank),
            "lora_alpha": str(recipe.lora_alpha),
            "seed": str(recipe.seed),
            "dataset": plan.version.name,
            "dataset_version": str(plan.version.version),
            "git_commit": plan.record.environment.git_commit,
        }.items()
    )
    control_plane.database.close()


def test_pods_and_limits_of_a_submission_reach_its_training(home: Path) -> None:
    control_plane = ControlPlane()
    schedule = {"retries": 2, "grace_period": "60s"}
    pod = {"secrets": ["wandb"], "volumes": [{"claim": "data", "path": "/data"}]}
    config = {**ASSISTANT, "schedule": schedule, "env": {"NCCL_DEBUG": "INFO"}, "pod": pod}
    control_plane.jobs.submit(name="n", config=config, user="u", organization=DEFAULT_ORGANIZATION, id="pods")
    plan = make_training_plan(dry_run.load_definition("ellarin-assistant"), "pods", control_plane)
    job = training_job(plan, control_plane)
    assert (job.schedule.retries, job.schedule.grace_seconds, job.env) == (2, 60, {"NCCL_DEBUG": "INFO"})
    assert job.pod == PodSettings.model_validate(pod)
    control_plane.database.close()


def test_resumed_run_uses_the_remaining_gpus_and_a_rollback_changes_its_work_digest(home: Path) -> None:
    """Its recipe stays the original one; of 32 GPUs, 24 are left."""
    control_plane = ControlPlane()
    four_nodes = {"strategy": "ddp", "num_nodes": 4, "gpus_per_node": 8}
    hardware = {"gpus": 8, "gpu_type": "nvidia-a100-80gb"}
    parameters = {"distributed": four_nodes, "hardware": hardware, "batch_size": 4, "gradient_accumulation": 1}
    config = {**ASSISTANT, "parameters": parameters}
    control_plane.jobs.submit(name="n", config=config, user="u", organization=DEFAULT_ORGANIZATION, id="left")

    def job() -> Job:
        return training_job(
            make_training_plan(dry_run.load_definition("ellarin-assistant"), "left", control_plane), control_plane
        )

    first = job()
    control_plane.jobs.cancel("left")
    control_plane.jobs.resume("left", ResumeHistory(times=1, gpus=24), {})
    fewer = job()
    assert fewer.distributed is not None and (fewer.distributed.num_nodes, fewer.distributed.gpus_per_node) == (3, 8)
    assert (first.gpus, fewer.gpus, fewer.hardware.gpu_type) == (32, 24, "nvidia-a100-80gb")
    assert fewer.parameters == first.parameters and fewer.work_digest == first.work_digest
    control_plane.jobs.cancel("left")
    back = Rewind(step=20, done=45)
    control_plane.jobs.resume("left", ResumeHistory(times=2, gpus=24, sent_back=(back,)), {})
    assert job().gpus == 24 and job().work_digest != first.work_digest, "a result from before is none of it"
    assert TrainParameters.model_validate(job().parameters).sent_back == (back,)
    control_plane.jobs.cancel("left")
    control_plane.jobs.resume("left", ResumeHistory(times=3, gpus=129), {})
    with pytest.raises(BadConfiguration, match="129 processes need a row each, but a step has only 128"):
        job()
    control_plane.database.close()


@pytest.mark.requirement("E5", "Y2")
@pytest.mark.parametrize(("reported", "held"), [(2, 2), (0, 0), (None, 2)])
def test_completed_run_records_its_usage_and_environment(
    home: Path, tmp_path: Path, reported: int | None, held: int
) -> None:
    """Half an hour on two GPUs of three dollars an hour each.

    A run that requested two, but got none, used none.
    """
    control_plane = ControlPlane()
    hardware = {"gpus": 2, "gpu_type": "nvidia-a100-80gb"}
    config = {**ASSISTANT, "parameters": {"hardware": hardware, "distributed": {"gpus_per_node": 2}}}
    plan, made = trained("used", config, control_plane, tmp_path)
    facts = TrainingFacts(
        train_seconds=1800.0,
        gpus=reported,
        gpu_seconds=held * 1800.0,
        resumed_from=None,
        unsent_metrics=0,
        losses={1: 2.0},
        published_step=1,
        tokens=4096,
        peak_memory=5_000_000_000,
        checkpoint_seconds=9.0,
        longest_checkpoint=9.0,
        checkpoint_share=0.005,
    )
    result = Result(
        work_digest="0" * 64,
        artifacts={"adapter": made},
        metrics={"total_steps": 1.0},
        facts=facts.model_dump(mode="json"),
        machine=Machine(python="3.11.7", packages={"torch": "2.13.0"}, processor="EPYC", gpus=("H200", "H200"), threads=4),
    )
    log_params(plan, control_plane)
    code = {"environment/lock_sha256", "environment/git_dirty"}
    assert code <= RunData(control_plane.database).tags("used").keys()  # a failed run records its code too
    complete_training(replace(plan, splits={}), training_job(plan, control_plane), result, control_plane)
    with control_plane.database.read() as connection:
        rows = connection.execute(
            select(latest_metrics.c.key, latest_metrics.c.value).where(latest_metrics.c.run_id == "used")
        )
        used = {row.key: row.value for row in rows}
    assert used.pop("train/loss") == 2.0
    assert used == {
        "system/gpu_count": held,
        "system/total_gpu_hours": held / 2,
        "system/total_steps": 1.0,
        "system/dollars": held * 1.5,
        "system/total_tokens_processed": 4096.0,
        "system/peak_memory_gb": 5.0,
        "system/checkpoint_share": 0.005,
    }
    tags = RunData(control_plane.database).tags("used")
    assert tags.get("system/gpu_type") == ("nvidia-a100-80gb" if held else None)
    environment = {key: value for key, value in tags.items() if key.startswith("environment/")}
    assert environment == {
        "environment/lock_sha256": hashlib.sha256(Path("requirements.lock").read_bytes()).hexdigest(),
        "environment/git_dirty": str(plan.record.environment.git_dirty).lower(),
        "environment/python": "3.11.7",
        "environment/processor": "EPYC",
        "environment/gpus": "H200, H200",
        "environment/torch": "2.13.0",
    }
    assert control_plane.jobs.read("used").status == "completed"
    control_plane.database.close()


def test_unsent_metric_points_are_logged_once_after_the_program_ended(home: Path, tmp_path: Path) -> None:
    """Each step is logged once.

    This includes points that arrived unacknowledged, steps repeated after a kill, and an end that is recorded twice. A
    step with another result the second time is logged twice.
    """
    control_plane = ControlPlane()
    plan, made = trained("unheard", ASSISTANT, control_plane, tmp_path)
    job = training_job(plan, control_plane)
    unsent = [UnsentPoint(key="train/loss", value=1 / step, step=step, timestamp=step) for step in range(1, 2502)]
    odd = [UnsentPoint(key=key, value=float("nan"), step=1, timestamp=1) for key in ("train/grad_norm", "no * name")]
    repeated = [
        UnsentPoint(key="eval/loss", value=0.5, step=3, timestamp=30, anew=True),
        UnsentPoint(key="eval/loss", value=0.4, step=4, timestamp=40, anew=True, since=20),
        UnsentPoint(key="eval/loss", value=0.4, step=5, timestamp=50, anew=True, since=20),
    ]
    write_unsent_metrics(control_plane.store, result_folder(job), [*unsent, *odd, *repeated])
    for key, value, step, timestamp in (
        ("train/loss", 1.0, 1, 1),
        ("train/loss", 1 / 2, 2, 99),
        *[("eval/loss", 0.7, step, step) for step in (3, 4, 5)],
        ("eval/loss", 0.4, 5, 45),  # by a process that was killed after repeating it
    ):
        RunData(control_plane.database).log_metric("unheard", metric_point(key, value, step, timestamp))
    facts = TrainingFacts(
        train_seconds=1.0,
        resumed_from=None,
        unsent_metrics=len(unsent) + len(odd) + len(repeated),
        losses={},
        published_step=1,
        tokens=1,
        peak_memory=1,
        checkpoint_seconds=0.0,
        longest_checkpoint=0.0,
        checkpoint_share=0.0,
    ).model_dump(mode="json")
    result = Result(work_digest="0" * 64, artifacts={"adapter": made}, metrics={"total_steps": 1.0}, facts=facts)
    for _ in range(2):
        complete_training(replace(plan, splits={}), job, result, control_plane)
    logged = Metrics(control_plane.database)
    points = logged.history("unheard", "train/loss", 3000).points
    times = {2: 99}
    assert sorted((point.step, point.value, point.timestamp) for point in points) == [
        (point.step, point.value, times.get(point.step, point.timestamp)) for point in unsent
    ]
    evaluated = [(point.step, point.value, point.timestamp) for point in logged.history("unheard", "eval/loss", 9).points]
    assert evaluated == [(3, 0.7, 3), (4, 0.7, 4), (5, 0.7, 5), (3, 0.5, 30), (4, 0.4, 40), (5, 0.4, 45)]
    assert [point.is_nan for point in logged.history("unheard", "train/grad_norm", 3).points] == [True]
    control_plane.database.close()


def test_losses_lost_by_a_database_restore_are_logged_from_the_result(home: Path, tmp_path: Path) -> None:
    """Each once, also when the end is recorded twice; existing points are unchanged."""
    control_plane = ControlPlane()
    plan, made = trained("lost", ASSISTANT, control_plane, tmp_path)
    job = training_job(plan, control_plane)
    for step, value in ((1, 3.0), (2, 2.5)):  # before the backup
        RunData(control_plane.database).log_metric("lost", metric_point("train/loss", value, step, step))
    facts = TrainingFacts(
        train_seconds=1.0,
        resumed_from=None,
        unsent_metrics=0,
        losses={1: 3.0, 2: 2.0, 3: 1.5, 4: None, 5: 1.0},
        published_step=5,
        tokens=1,
        peak_memory=1,
        checkpoint_seconds=0.0,
        longest_checkpoint=0.0,
        checkpoint_share=0.0,
    ).model_dump(mode="json")
    result = Result(work_digest="0" * 64, artifacts={"adapter": made}, metrics={"total_steps": 5.0}, facts=facts)
    for _ in range(2):
        complete_training(replace(plan, splits={}), job, result, control_plane)
    points = Metrics(control_plane.database).history("lost", "train/loss", 9).points
    assert [(point.step, point.value) for point in points] == [(1, 3.0), (2, 2.5), (3, 1.5), (5, 1.0)]
    control_plane.database.close()


def test_permanently_failed_run_is_tagged_with_its_recovery_events(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control_plane = ControlPlane()
    smaller = OutOfMemory(step=3, batch_size=1, gradient_accumulation=8)

    def dies(_compute: LocalCompute, job: Job, _follower: object) -> None:
        add_recovery_event(control_plane.store, job.outputs["checkpoints"], smaller)
        raise JobFailed("killed")

    monkeypatch.setattr(LocalCompute, "run", dies)
    partitions = dg.DynamicPartitionsDefinition(name="runs")
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions("runs", ["dead"])
        result = dg.materialize(
            [build_checkpoint(dry_run.load_definition("ellarin-assistant"), partitions)],
            instance=instance,
            partition_key="dead",
            resources={"control_plane": control_plane},
            raise_on_error=False,
        )
    assert not result.success
    assert RunData(control_plane.database).tags("dead")["health/incident_1"] == smaller.message
    control_plane.database.close()


def test_training_exceeding_gpu_memory_fails_with_a_hint_before_compute_is_called(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers jobs without a recipe, which the API cannot check, and manual launches."""
    control_plane = ControlPlane()
    asked: list[str] = []

    def ran(_compute: LocalCompute, job: Job, _follower: object) -> None:
        asked.append(job.id)
        raise JobFailed("was asked")

    monkeypatch.setattr(LocalCompute, "run", ran)
    assistant = dry_run.load_definition("ellarin-assistant")
    big = assistant.model_copy(update={"name": "big", "recipe": "zen-7b-full"})
    alone = {"strategy": "ddp", "num_nodes": 1, "gpus_per_node": 1}
    one_40gb = {"hardware": {"gpus": 1, "gpu_type": "nvidia-a100-40gb"}, "distributed": alone}
    unknown = {"hardware": {"gpus": 1, "gpu_type": "tpu-v5"}, "distributed": alone}
    partitions = dg.DynamicPartitionsDefinition(name="runs")

    def materialized(model: ModelDefinition, run_id: str, **given: Any) -> JobRecord:
        with dg.DagsterInstance.ephemeral() as instance:
            instance.add_dynamic_partitions("runs", [run_id])
            dg.materialize(
                [build_checkpoint(model, partitions)],
                instance=instance,
                partition_key=run_id,
                resources={"control_plane": control_plane},
                run_config={"ops": {"models__" + model.name.replace("-", "_") + "__checkpoint": {"config": given}}},
                raise_on_error=False,
            )
        return control_plane.jobs.read(run_id)

    config = {"name": "big", "model": "big", "parameters": one_40gb}
    control_plane.jobs.submit(name="big", config=config, user="u", organization=DEFAULT_ORGANIZATION, id="submitted")
    for job in (materialized(big, "submitted"), materialized(big, "clicked", parameters=one_40gb)):
        assert job.status == "failed"
        assert re.fullmatch(
            r"recipe 'zen-7b-full' needs [0-9.]+ GiB of the [0-9.]+ GiB on each nvidia-a100-40gb: "
            "use recipe 'zen-7b-lora', which fits 1 x nvidia-a100-40gb",
            job.reason,
        ), job.reason
    assert asked == []
    for model, run_id, parameters in ((big, "unknown", unknown), (big, "own", {}), (assistant, "demo", {})):
        materialized(model, run_id, parameters=parameters)
    assert asked == ["unknown", "own", "demo"], "hardware that nobody knows, its own eight GPUs, the demo on a CPU"
    control_plane.database.close()


def test_clicked_run_with_missing_or_invalid_settings_is_refused_before_training(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run named ../x was trained, but no version could be registered for it.

    Without a dataset, one named sandbox was used, and the reason began with an exception's class name.
    """
    control_plane = ControlPlane()
    sandbox = dry_run.load_definition("sandbox")
    for given, said in (
        ({"name": "../x", "dataset": "colours"}, "Invalid model name '../x'. Names cannot contain '/' or ':'."),
        ({"name": "mine"}, "the sandbox has no dataset of its own: set `dataset` in the launchpad of a new partition"),
        ({"name": "mine", "dataset": "colors"}, "there is no dataset 'colors'"),
    ):
        run_id = str(len(said))
        ensure_job(run_id, "sandbox", given, control_plane)
        with pytest.raises(BadConfiguration) as refused:
            make_training_plan(sandbox, run_id, control_plane)
        assert str(refused.value).startswith(said)
    control_plane.database.close()
