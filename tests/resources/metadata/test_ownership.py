"""Ownership of objects and events, the caller of each request, and totals over all organizations."""

import pytest

from resources.metadata.audit_log import AuditedCall, list_calls, record_calls
from resources.metadata.database import Database
from resources.metadata.datasets import Datasets
from resources.metadata.field_rules import LARGEST_DOUBLE, MetricPoint
from resources.metadata.jobs import COMMAND, Jobs
from resources.metadata.outbox import emit, now_ms
from resources.metadata.ownership import ObjectKind, Owner, Reference, find_owners, list_events
from resources.metadata.registry.model_names import ModelKey
from resources.metadata.registry.registered_models import RegisteredModels
from resources.metadata.tables import artifacts, dataset_versions
from resources.metadata.tracking.tracking import Tracking
from resources.monitoring.usage_totals import DURATION_BUCKETS, read_totals
from tests.support.metered_gpus import meter_attempt


def dataset(organization: str) -> dict[str, object]:
    empty: dict[str, object] = {}
    return {
        "id": f"dataset-{organization}",
        "name": "corpus",
        "version": 1,
        "organization": organization,
        "created_at": now_ms(),
        "created_by": "ann",
        "storage_path": "s3://hanzo-ml/datasets/corpus/1/",
        "format": "jsonl",
        "size_bytes": 1,
        "num_records": 1,
        **dict.fromkeys(("schema", "splits", "metadata", "lineage"), empty),
        "artifact": {
            "kind": "dataset",
            "uri": "s3://hanzo-ml/datasets/corpus/1/records",
            "digest": "0" * 64,
            "size_bytes": 1,
        },
        "tags": [],
        "content_sha256": "0",
    }


def filled(database: Database) -> dict[str, str]:
    """Create an experiment, a job and run, a model and a dataset per organization."""
    ids = {}
    for organization in ("acme", "rival"):
        config = {"dataset": "corpus@1", "priority": "high"} if organization == "acme" else {"dataset": "corpus@1"}
        job = Jobs(database).submit(name="j", config=config, user="ann", organization=organization)
        RegisteredModels(database).create(ModelKey(organization, f"model-{organization}"))
        with database.write() as connection:
            connection.execute(dataset_versions.insert().values(**dataset(organization)))
            facts = {"dataset_id": f"dataset-{organization}"}
            emit(connection, "datasets", "dataset.created", "corpus", facts)
            emit(connection, "models", "evaluation.started", job.id, {"job_id": job.id})
            emit(connection, "gpu", "gpu.sample", "node-1", {})
            record_calls(connection, [AuditedCall("ann", organization, ("ml-admin",), "POST", "/r", (), 200, "c", 1.0)])
        ids[organization] = job.id
    return ids


def test_owner_is_found_for_every_kind_of_object(database: Database) -> None:
    ids = filled(database)
    experiment = Tracking(database).runs.get(ids["acme"]).experiment_id
    logged = Tracking(database).logged_models.create(experiment, name="m")
    expected = {
        Reference(ObjectKind.EXPERIMENT, str(experiment)): Owner("acme"),
        Reference(ObjectKind.RUN, ids["acme"]): Owner("acme"),
        Reference(ObjectKind.RUN, ids["rival"]): Owner("rival"),
        Reference(ObjectKind.JOB, ids["rival"]): Owner("rival", "ann"),
        Reference(ObjectKind.LOGGED_MODEL, logged.model.id): Owner("acme"),
        Reference(ObjectKind.REGISTERED_MODEL, "model-rival"): Owner("rival"),
        Reference(ObjectKind.DATASET, "dataset-acme"): Owner("acme"),
        Reference(ObjectKind.ORGANIZATION, "acme"): Owner("acme"),
    }
    odd = {
        Reference(kind, text)
        for kind in ObjectKind
        if kind is not ObjectKind.ORGANIZATION
        for text in ("no", "", "a\x00b", "\ud800", "9" * 30, "-1", "' OR 1=1 --")
    }
    many = {Reference(ObjectKind.RUN, f"run-{number}") for number in range(1200)}
    with database.read() as connection:
        assert find_owners(connection, {*expected, *odd, *many}, "rival") == expected
        model = Reference(ObjectKind.REGISTERED_MODEL, "model-rival")
        assert find_owners(connection, {model}, "acme") == {}, "another one's model of that name is another model"


def test_events_are_limited_to_objects_of_the_organization(database: Database) -> None:
    ids = filled(database)
    with database.read() as connection:
        mine = list_events(connection, "rival", 0, limit=1000)
        every = list_events(connection, None, 0, limit=1000)
        runs = list_events(connection, "rival", 0, ["run.created"])
        later = list_events(connection, "rival", mine[1].seq, limit=1)
    assert {event.type for event in mine} >= {
        "job.submitted",
        "run.created",
        "dataset.created",
        "evaluation.started",
        "model.created",
    }
    tracking = Tracking(database)
    experiment = tracking.runs.get(ids["rival"]).experiment_id
    tracking.logged_models.create(experiment, name="m")
    tracking.experiments.delete(experiment)
    with database.write() as connection:
        version = Datasets(database).get("dataset-rival", connection)
        Datasets(database).remove(connection, version, "ann")
    with database.read() as connection:
        after = {organization: list_events(connection, organization, every[-1].seq, limit=1000) for organization in ids}
    assert [event.type for event in after["rival"]] == ["logged_model.created", "experiment.deleted", "dataset.deleted"]
    assert after["acme"] == []
    assert not any(ids["acme"] in str(event) or "acme" in str(event) for event in mine)
    assert {"gpu", "jobs", "models", "datasets"} == {event.topic for event in every}
    assert [event.key for event in runs] == [ids["rival"]]
    assert later == mine[2:3]


def test_calls_are_found_by_user_and_time(database: Database) -> None:
    filled(database)
    with database.read() as connection:
        [call] = list_calls(connection, "acme")
        assert (call.topic, call.type, call.key) == ("audit", "audit.call", "acme/ann")
        assert call.payload["roles"] == ["ml-admin"] and call.payload["count"] == 1
        assert list_calls(connection, "acme", user="bob") == list_calls(connection, "acme", after=call.seq) == []
        assert list_calls(connection, "acme", since=call.created_at, user="ann", type="audit.call") == [call]
        assert list_calls(connection, "acme", since=call.created_at + 1) == []


@pytest.mark.requirement("Y3")
def test_totals_count_jobs_hours_and_storage_by_organization(database: Database) -> None:
    ids = filled(database)
    jobs = Jobs(database)
    jobs.start(ids["acme"])
    jobs.fail(ids["acme"], "out of memory")
    jobs.start(ids["acme"])
    tracking = Tracking(database)
    meter_attempt(database, ids["acme"], 2.5, gpu_type="nvidia-h100-80gb")
    rivals = tracking.experiments.create("boast", "rival").id
    for _ in range(2):  # these logged values, whose sum is not a double, must not break the counts of others
        boasting = tracking.runs.create(rivals).id
        tracking.run_data.log_metric(boasting, MetricPoint("system/total_gpu_hours", LARGEST_DOUBLE, 0, 1))
    with database.write() as connection:
        for digest, uri in (("1", "s3://hanzo-ml/datasets/a/1"), ("2", "s3://hanzo-ml/runs/r/1"), ("3", "pypi://x")):
            row = {"digest": digest, "kind": "k", "uri": uri, "size_bytes": 7, "recorded_at": 1}
            connection.execute(artifacts.insert().values(**row))
    with database.read() as connection:
        totals = read_totals(connection)
    reached = {(status, org): count for (_, status, org), count in totals.jobs.items()}
    assert reached == {
        ("queued", "acme"): 1,
        ("queued", "rival"): 1,
        ("running", "acme"): 1,
        ("failed", "acme"): 1,
    }
    assert totals.running == {("training", "acme"): 1}
    assert totals.queued == {("rival", "medium"): 1}
    assert totals.gpu_hours == {("nvidia-h100-80gb", "acme"): 2.5}
    assert totals.datasets == {("acme",): 1, ("rival",): 1}
    assert totals.models == {("acme",): 0, ("rival",): 0}
    assert totals.stored_bytes == {"datasets": 7, "checkpoints": 7}
    assert totals.durations == {}
    jobs.fail(ids["acme"], "again")
    with database.read() as connection:
        durations = read_totals(connection).durations["training"]
    assert durations.count == 1 and list(durations.within) == [1] * len(DURATION_BUCKETS)


def test_gpus_count_as_allocated_while_an_attempt_holds_them(database: Database) -> None:
    meter_attempt(database, "a", 1.0, gpus=32, gpu_type="nvidia-h100-80gb")
    meter_attempt(database, "b", 1.0, gpus=8, gpu_type="nvidia-h100-80gb", ends=False)
    meter_attempt(database, "c", 1.0, ends=False)
    asks = {"resources": {"gpus": 8, "gpu_type": "nvidia-a100-80gb"}}
    Jobs(database).submit(name="mine", config=asks, user="ann", organization="acme", id="d", status="running")
    with database.read() as connection:
        assert read_totals(connection).gpus_allocated == {("nvidia-h100-80gb",): 8, ("unknown",): 1}


def test_command_is_counted_under_its_submitted_type(database: Database) -> None:
    """Regression: all of them were counted as `command`, which no dashboard panel queries."""
    jobs = Jobs(database)
    for id, type in (("a", "training"), ("b", "eval"), ("c", "eval")):
        config = {"type": type, "command": ["true"]}
        jobs.submit(name="mine", config=config, user="ann", organization="acme", id=id, type=COMMAND)
        jobs.start(id)
    with database.read() as connection:
        totals = read_totals(connection)
    assert totals.running == {("training", "acme"): 1, ("eval", "acme"): 2}
    assert totals.jobs.keys() == {
        (type, status, "acme") for type in ("training", "eval") for status in ("queued", "running")
    }
    for id in ("a", "b", "c"):
        jobs.fail(id, "no such column")
    with database.read() as connection:
        ended = read_totals(connection).durations
    assert {type: durations.count for type, durations in ended.items()} == {"training": 1, "eval": 2}
