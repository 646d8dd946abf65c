"""From a submitted preparation to a version: sensor, asset, program, and end of the job."""

import hashlib
from dataclasses import replace
from pathlib import Path

import dagster as dg
import pytest
from sqlalchemy import insert

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.datasets import SPLITS, split_job
from hanzo_ml_assets.definition_schema import DatasetDefinition, Preparation
from hanzo_ml_assets.definitions import definitions
from hanzo_ml_assets.preparation import PREPARATION_TAG, build_prepared, newest_source_version, preparation_job
from hanzo_ml_assets.run_tags import VERSION_TAG
from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.job import Hardware, Result
from recipes.contracts.parameters import PrepareParameters, SplitParameters, TokenizeParameters
from recipes.storage.manifest import canonical_json
from resources.compute.base import JobFailed
from resources.compute.local.backend import LocalCompute
from resources.datasets.prepared_versions import Derivation, refuse_unknown_columns
from resources.errors import HanzoError
from resources.metadata.datasets import MAX_PAGE
from resources.metadata.jobs import PREPARATION, JobRecord
from resources.metadata.tables import dataset_versions
from sensors.decisions.retry_policy import read_failure
from sensors.start_submitted_jobs import start_submitted_jobs
from sensors.start_submitted_preparations import start_submitted_preparations
from tests.support.assets.control_plane import plane

__all__ = ["plane"]


def submit(plane: ControlPlane, **sections: object) -> JobRecord:
    parameters = PrepareParameters.model_validate(sections).model_dump(mode="json")
    config = {"name": "d", "dataset": "d@1", "parameters": parameters, "workers": 1}
    return plane.jobs.submit(name="p", config=config, user="ann", organization="default", type=PREPARATION)


@pytest.mark.requirement("C4")
def test_a_submitted_preparation_becomes_a_version(plane: ControlPlane) -> None:
    asked = submit(plane, filter={"language": "en"})
    found = definitions()
    repository = found.get_repository_def()
    with dg.DagsterInstance.ephemeral() as instance:
        context = dg.build_sensor_context(instance=instance, repository_def=repository)
        training = start_submitted_jobs.on(plane)(context)
        assert isinstance(training, dg.SensorResult)
        assert not training.run_requests
        started = start_submitted_preparations.on(plane)(context)
        assert isinstance(started, dg.SensorResult)
        (request,) = started.run_requests or []
        assert request.run_key == asked.id
        assert request.asset_selection == [dg.AssetKey(["datasets", "sandbox", "prepared"])]
        job = found.resolve_implicit_global_asset_job_def()
        done = job.execute_in_process(
            instance=instance, asset_selection=list(request.asset_selection), tags={PREPARATION_TAG: asked.id}
        )
    assert done.success
    version = plane.datasets.read("d", "default")
    assert (version.reference, version.lineage["parent_datasets"]) == ("d@2", ["d@1"])
    assert set(version.splits) == {"train", "validation", "test"}
    assert plane.jobs.read(asked.id).status == "completed"


def test_preparation_job_has_the_requested_workers_and_pods(plane: ControlPlane) -> None:
    derivation = Derivation(plane.datasets.read("d@1", "default"), "d", PrepareParameters(), "ann")
    asked = submit(plane)
    one = preparation_job(derivation, asked, plane, Preparation())
    asks = replace(asked, config={**asked.config, "workers": 2, "pods": 3})
    usual = Preparation(resources=Hardware(cpu=8, memory="16Gi"), workers=5)
    more = preparation_job(derivation, asks, plane, usual)
    by_definition = preparation_job(derivation, None, plane, usual)
    assert [(job.hardware.cpu, job.pods) for job in (one, more, by_definition)] == [(1, 1), (2, 3), (8, 5)]
    assert more.hardware.memory == "16Gi"
    assert more.work_digest == one.work_digest, "neither is a part of what comes out"


def test_changed_tokenizer_files_change_the_output_location(plane: ControlPlane, tmp_path: Path) -> None:
    """Outputs without a tokenizer, or with a hub one, keep their earlier location."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")

    def place(tokenizer: str | None) -> str:
        wanted = PrepareParameters(tokenize=TokenizeParameters(tokenizer=tokenizer) if tokenizer else None)
        derivation = Derivation(plane.datasets.read("d@1", "default"), "d", wanted, "ann")
        return preparation_job(derivation, None, plane, Preparation()).outputs["train"]

    first = place(folder.as_uri())
    assert place(folder.as_uri()) == first
    (folder / "tokenizer.json").write_text('{"other": 1}')
    assert place(folder.as_uri()) != first
    for tokenizer in (None, "zenlm/zen-72b"):
        wanted = PrepareParameters(tokenize=TokenizeParameters(tokenizer=tokenizer) if tokenizer else None)
        label = hashlib.sha256(canonical_json(wanted.model_dump(mode="json"))).hexdigest()[:12]
        assert f"/prepared-d-1-{label}/" in place(tokenizer)


def test_definition_with_an_unknown_preparation_column_fails(plane: ControlPlane) -> None:
    """Otherwise all records would be one group, or all of one class."""
    parameters = PrepareParameters(split=SplitParameters(group_by="clas"))
    asset = build_prepared(DatasetDefinition(name="d", prepare=parameters))
    with dg.DagsterInstance.ephemeral() as instance:
        done = dg.materialize([asset], instance=instance, resources={"control_plane": plane}, raise_on_error=False)
    (failure,) = (event for event in done.all_events if event.is_step_failure)
    assert "no record of dataset d@1 has the column 'clas' of split.group_by: it has answer, instruction" in str(failure)


def test_unknown_column_in_clean_settings_is_refused(plane: ControlPlane) -> None:
    """A misspelled name would reject every record, or none, or fill an unused column."""
    parent = plane.datasets.read("d@1", "default")
    for setting, value in {"required": ["scor"], "fill": {"scor": 1}, "within": {"scor": {"min": 1}}}.items():
        with pytest.raises(HanzoError, match=f"has the column 'scor' of clean.{setting}: it has answer, instruction"):
            refuse_unknown_columns(PrepareParameters.model_validate({"clean": {setting: value}}), parent)


def test_unknown_column_message_lists_only_the_first_columns(plane: ControlPlane) -> None:
    parent = replace(plane.datasets.read("d@1", "default"), schema={f"c{number}": "string" for number in range(10_000)})
    with pytest.raises(HanzoError) as refused:
        refuse_unknown_columns(PrepareParameters(split=SplitParameters(column="x" * 9000)), parent)
    assert "c0, c1, " in refused.value.message and "and 9980 more" in refused.value.message
    assert len(refused.value.message) < 500


def test_newest_source_version_is_found_beyond_one_page(plane: ControlPlane) -> None:
    first = plane.datasets.read("d@1", "default")
    rows = [
        vars(first) | {"id": str(n), "version": n, "content_sha256": str(n), "artifact": first.artifact.model_dump()}
        for n in range(2, MAX_PAGE + 3)
    ]
    rows[-1]["lineage"] = {"parent_datasets": ["d@1"], "transform": {}}
    with plane.database.write() as connection:
        connection.execute(insert(dataset_versions), rows)
    assert newest_source_version(DatasetDefinition(name="d"), plane).version == MAX_PAGE + 1, (
        "the one after it was prepared itself"
    )


def test_prepared_version_is_checked_and_keeps_its_splits(plane: ControlPlane) -> None:
    """Also when its splits are launched manually: others would differ from what was tokenized."""
    asked = submit(plane, filter={"language": "en"}, augment={"shuffle_seed": 7})
    job = definitions().resolve_implicit_global_asset_job_def()
    sandbox = ["datasets", "sandbox"]
    with dg.DagsterInstance.ephemeral() as instance:

        def check(reference: str) -> dg.ExecuteInProcessResult:
            steps = [dg.AssetKey([*sandbox, step]) for step in ("version", *SPLITS)]
            return job.execute_in_process(instance=instance, asset_selection=steps, tags={VERSION_TAG: reference})

        assert check("d@1").success
        job.execute_in_process(
            instance=instance, asset_selection=[dg.AssetKey([*sandbox, "prepared"])], tags={PREPARATION_TAG: asked.id}
        )
        made = plane.datasets.read("d", "default")
        checked = check(made.reference)
        train = instance.get_latest_materialization_event(dg.AssetKey([*sandbox, "train"]))
    assert checked.success
    assert plane.datasets.read("d@2", "default") == made
    assert train is not None and train.asset_materialization is not None
    assert train.asset_materialization.metadata["digest"].value == made.split("train").digest
    with plane.database.read() as connection:
        found = plane.validations.find(made.id, connection)
        assert plane.validations.has_split_verdict(made.id, connection)
    assert found is not None and found.leaks is not None
    assert (found.standing.status, found.leaks.tested) == ("passed", made.splits["test"]["num_records"])
    assert found.leaks.searched == 2, "its own training records, and those of what it was made of"


def test_impossible_preparation_fails_its_job_with_the_reason(plane: ControlPlane) -> None:
    asked = submit(plane, split={"column": "part"})
    with dg.DagsterInstance.ephemeral() as instance:
        done = (
            definitions()
            .resolve_implicit_global_asset_job_def()
            .execute_in_process(
                instance=instance,
                asset_selection=[dg.AssetKey(["datasets", "sandbox", "prepared"])],
                tags={PREPARATION_TAG: asked.id},
                raise_on_error=False,
            )
        )
    assert not done.success
    job = plane.jobs.read(asked.id)
    assert job.status == "failed"
    assert str(job.reason).startswith("no record is left: 60 split; the first: ")


def test_preparation_job_survives_an_infrastructure_failure(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sensor retry_dead_runs retries it: the next run continues the same job."""
    asked = submit(plane, filter={"language": "en"})
    job = definitions().resolve_implicit_global_asset_job_def()
    steps = [dg.AssetKey(["datasets", "sandbox", "prepared"])]

    def killed(*_: object) -> Result:
        raise JobFailed("prepare failed after 12 attempts", ExitReason.STORAGE_UNAVAILABLE)

    with dg.DagsterInstance.ephemeral() as instance:
        with monkeypatch.context() as patched:
            patched.setattr(LocalCompute, "run", killed)
            tags = {PREPARATION_TAG: asked.id}
            done = job.execute_in_process(instance=instance, asset_selection=steps, tags=tags, raise_on_error=False)
        assert read_failure(instance, done.dagster_run).reasons == {ExitReason.STORAGE_UNAVAILABLE}
        assert plane.jobs.read(asked.id).status == "running"
        assert job.execute_in_process(instance=instance, asset_selection=steps, tags=tags).success
    assert plane.jobs.read(asked.id).status == "completed"


def test_changed_record_parsing_changes_split_and_preparation_locations(plane: ControlPlane) -> None:
    """Splits and preparations of records that are parsed as before keep their location."""
    definition = DatasetDefinition(name="d")
    known = plane.datasets.read("d@1", "default")

    def labels(**columns: str) -> tuple[str, str]:
        version = replace(known, schema=columns)
        split = split_job(definition, version, plane).result_uri
        derivation = Derivation(version, "d", PrepareParameters(), "ann")
        return split, preparation_job(derivation, None, plane, Preparation()).result_uri

    before = labels(**known.schema)
    asked = labels(instruction="string", answer="string", input="string?")
    with_messages = labels(messages="array")
    assert [old == new for old, new in zip(before, asked, strict=True)] == [False, False]
    assert [old == new for old, new in zip(before, with_messages, strict=True)] == [True, False]
    label = hashlib.sha256(canonical_json(["lines of the version", definition.split.model_dump(mode="json")])).hexdigest()
    assert f"/{label[:12]}/" in before[0]
