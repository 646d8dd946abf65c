"""Version lifecycle: gapless numbers, one production version, enforced gate, correct state after rollback."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from api.schemas.mlflow.registry import version_message
from resources.errors import ErrorCode
from resources.metadata.database import Database
from resources.metadata.registry.search import page_versions
from resources.metadata.registry.version_lifecycle import ModelVersion
from tests.support.resources.model_versions import RegisteredVersions, artifact, model, refused, registration

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def versions(database: Database) -> RegisteredVersions:
    return RegisteredVersions(database)


def test_versions_are_numbered_from_one_without_gaps_for_each_name(versions: RegisteredVersions) -> None:
    numbers = [versions.register(f"r{n}").version for n in range(3)]
    assert numbers == [1, 2, 3]
    assert versions.register("r0", name="other").version == 1
    assert [version.version for version in page_versions(versions.database, model("m"))[0]] == [3, 2, 1]


def test_rolled_back_registration_leaves_no_gap_in_version_numbers(versions: RegisteredVersions) -> None:
    versions.register("r1")
    with pytest.raises(RuntimeError), versions.database.write() as connection:
        versions.registry.register(connection, model("m"), registration("lost"), {})
        raise RuntimeError
    assert versions.register("r2").version == 2
    assert len(versions.events("model.registered")) == 2


def test_a_run_has_one_version_however_often_it_is_registered(versions: RegisteredVersions) -> None:
    first = versions.register("r1", exported=False)
    assert versions.register("r1", exported=False, quarantine="changed my mind") == first
    assert len(versions.events("model.registered")) == 1


@pytest.mark.requirement("A4", "O8", "P4")
def test_new_version_is_in_staging_with_the_checksums_of_its_artifacts(versions: RegisteredVersions) -> None:
    version = versions.register("r1", exported=False)
    assert (version.stage, version.status) == ("staging", "pending")
    assert version.artifacts["adapter"]["checksum"] == "sha256:" + artifact("adapter").digest
    assert version.artifacts["adapter"]["path"] == artifact("adapter").uri + "/"
    assert version.artifact("adapter") == artifact("adapter")
    assert "has no gguf yet (it has adapter)" in refused(version.artifact, "gguf").message


def test_repeated_export_marks_a_version_ready_once(versions: RegisteredVersions) -> None:
    version = versions.register("r1")
    assert version.status == "ready"
    with versions.database.write() as connection:
        versions.registry.add_artifacts(connection, version, {"gguf": artifact("gguf", 1)})
    assert len(versions.events("model.exported")) == 1


def fail_export(versions: RegisteredVersions, version: ModelVersion, reason: str) -> ModelVersion:
    with versions.database.write() as connection:
        versions.registry.fail_export(connection, version, reason)
        return versions.registry.get(version.model, version.version, connection)


def test_failed_export_stays_on_the_version_until_another_attempt(versions: RegisteredVersions) -> None:
    version = fail_export(versions, versions.register("r1", exported=False), "no name for\nthe pre-tokenizer")
    assert (version.stage, version.status, version.reason) == ("staging", "failed", "no name for the pre-tokenizer")
    message = version_message(version)
    assert (message["status"], message["status_message"]) == ("FAILED_REGISTRATION", version.reason)
    error = refused(versions.promote, 1)
    assert error.code is ErrorCode.RESOURCE_CONFLICT and f"its export failed: {version.reason}" in error.message
    with versions.database.read() as connection:
        assert versions.registry.last_accepted(model("m"), connection) == version, "it passed its gate"
    with versions.database.write() as connection:
        versions.registry.begin_export(connection, version)
        version = versions.registry.get(model("m"), 1, connection)
        assert (version.status, version.reason) == ("pending", "")
    version = fail_export(versions, version, "once more")
    with versions.database.write() as connection:
        versions.registry.add_artifacts(connection, version, {"gguf": artifact("gguf")})
        version = versions.registry.get(model("m"), 1, connection)
    assert (version.status, version.reason) == ("ready", "")
    assert versions.promote(1).stage == "production"
    assert fail_export(versions, version, "of another quantization").status == "ready", "it is served all the same"


def test_failed_export_leaves_a_version_quarantined(versions: RegisteredVersions) -> None:
    version = versions.register("r1", exported=False, quarantine="worse")
    for _ in range(2):
        failed = fail_export(versions, version, "why")
        assert (failed.status, failed.reason) == ("quarantined", "worse; its export failed: why")
    assert "its export failed: why" in refused(versions.promote, 1, force=True, is_admin=True).message
    with versions.database.write() as connection:
        versions.registry.begin_export(connection, failed)
        assert versions.registry.get(model("m"), 1, connection).reason == "worse"


def test_version_without_export_is_not_promoted(versions: RegisteredVersions) -> None:
    versions.register("r1", exported=False)
    assert refused(versions.promote, 1).code is ErrorCode.RESOURCE_CONFLICT
    assert versions.stages() == {1: "staging"}


def test_promotion_archives_the_previous_version_and_names_it_in_its_event(versions: RegisteredVersions) -> None:
    for run in ("r1", "r2"):
        versions.register(run)
    versions.promote(1)
    versions.promote(2)
    assert versions.stages() == {1: "archived", 2: "production"}
    first, second = versions.events("model.promoted")
    assert {"name": "m", "version": 1, "stage": "production", "replaced": None}.items() <= first.payload.items()
    assert {"name": "m", "version": 2, "stage": "production", "replaced": 1}.items() <= second.payload.items()


@pytest.mark.requirement("Q3")
@pytest.mark.parametrize(
    ("type", "facts"),
    [
        ("model.registered", {"name": "m", "version": 1, "run_id": "r1"}),
        ("model.promoted", {"name": "m", "version": 1, "stage": "production"}),
    ],
)
def test_model_event_has_the_fields_of_the_specification(
    versions: RegisteredVersions, type: str, facts: dict[str, Any]
) -> None:
    versions.register("r1")
    versions.promote(1)
    (event,) = versions.events(type)
    assert (event.topic, event.key) == ("models", "m")
    assert {**facts, "timestamp": event.created_at}.items() <= event.payload.items()


def test_promoting_the_production_version_again_writes_no_second_event(versions: RegisteredVersions) -> None:
    versions.register("r1")
    versions.promote(1)
    versions.promote(1)
    assert len(versions.events("model.promoted")) == 1


@pytest.mark.requirement("O5")
def test_archived_version_can_be_promoted_again(versions: RegisteredVersions) -> None:
    for run in ("r1", "r2"):
        versions.register(run)
    for number in (1, 2, 1):
        versions.promote(number)
    assert versions.stages() == {1: "production", 2: "archived"}


def test_promotion_leaves_the_production_version_of_another_model(versions: RegisteredVersions) -> None:
    versions.register("r1")
    versions.register("r1", name="other")
    versions.promote(1)
    versions.registry.promote(model("other"), 1, "production", user="ann")
    assert versions.stages() == {1: "production"}


@pytest.mark.requirement("Y8")
@pytest.mark.parametrize("stage", ["staging", "production"])
def test_a_quarantined_version_needs_force_and_an_admin(versions: RegisteredVersions, stage: str) -> None:
    version = versions.register("r1", quarantine="perplexity 900 is worse")
    assert (version.stage, version.status, version.reason) == ("none", "quarantined", "perplexity 900 is worse")
    for more in ({}, {"is_admin": True}):
        error = refused(versions.promote, 1, stage, **more)
        assert error.code is ErrorCode.RESOURCE_CONFLICT and "perplexity 900 is worse" in error.message
    assert refused(versions.promote, 1, stage, force=True).code is ErrorCode.PERMISSION_DENIED
    assert versions.stages() == {1: "none"} and versions.events("model.promoted") == []
    assert versions.promote(1, stage, force=True, is_admin=True).stage == stage
    assert versions.events("model.promoted")[0].payload["forced"] is True


@pytest.mark.parametrize("detour", ["archived", "none"])
def test_detour_over_another_stage_leaves_a_version_quarantined(versions: RegisteredVersions, detour: str) -> None:
    versions.register("r1", quarantine="worse")
    versions.promote(1, detour)
    assert refused(versions.promote, 1).code is ErrorCode.RESOURCE_CONFLICT


def test_export_leaves_a_version_quarantined(versions: RegisteredVersions) -> None:
    assert versions.register("r1", quarantine="worse").status == "quarantined"


def test_force_promoted_version_is_not_the_last_accepted_one(versions: RegisteredVersions) -> None:
    versions.register("r1")
    versions.register("r2", quarantine="worse")
    versions.promote(2, force=True, is_admin=True)
    with versions.database.read() as connection:
        accepted = versions.registry.last_accepted(model("m"), connection)
    assert accepted is not None and accepted.version == 1


@pytest.mark.requirement("O3")
@pytest.mark.parametrize(("number", "stage"), [(9, "production"), (1, "prod"), (1, "")])
def test_unknown_version_or_stage_is_refused_without_a_change(versions: RegisteredVersions, number: int, stage: str) -> None:
    versions.register("r1")
    refused(versions.promote, number, stage)
    assert versions.stages() == {1: "staging"}


@pytest.mark.parametrize("name", ["", "a/b", "a:b"])
def test_a_name_that_cannot_be_addressed_is_refused(versions: RegisteredVersions, name: str) -> None:
    refused(versions.register, "r1", name=name)


def test_failed_deployment_restores_the_previous_production_version(versions: RegisteredVersions) -> None:
    for run in ("r1", "r2"):
        versions.register(run)
    versions.promote(1)
    versions.promote(2)
    versions.restore(2, 1)
    assert versions.stages() == {1: "production", 2: "staging"}
    (event,) = versions.events("model.restored")
    assert {"version": 2, "restored": 1, "reason": "it answered nonsense"}.items() <= event.payload.items()
    assert len(versions.events("model.promoted")) == 2  # a version that serves already is not deployed again


def test_a_first_deployment_that_failed_leaves_nothing_in_production(versions: RegisteredVersions) -> None:
    versions.register("r1")
    versions.promote(1)
    versions.restore(1, None)
    assert versions.stages() == {1: "staging"}


def test_forced_version_that_fails_to_deploy_returns_to_stage_none(versions: RegisteredVersions) -> None:
    versions.register("r1", quarantine="worse")
    versions.promote(1, force=True, is_admin=True)
    versions.restore(1, None)
    assert versions.stages() == {1: "none"}


def test_restore_of_a_version_replaced_meanwhile_changes_nothing(versions: RegisteredVersions) -> None:
    for run in ("r1", "r2", "r3"):
        versions.register(run)
    for number in (1, 2, 3):
        versions.promote(number)
    versions.restore(2, 1)
    versions.restore(2, 1)
    assert versions.stages() == {1: "archived", 2: "archived", 3: "production"}
    assert versions.events("model.restored") == []


PROMOTES = """
import sys
sys.path.insert(0, sys.argv[1])
from resources.metadata.database import Database
from tests.support.resources.model_versions import RegisteredVersions
versions = RegisteredVersions(Database(sys.argv[2]))
sys.stdin.readline()
for round in range(15):
    versions.promote(1 + (int(sys.argv[3]) + round) % 3)
    versions.register(f"{sys.argv[3]}-{round}")
"""


@pytest.mark.requirement("O4")
@pytest.mark.slow
def test_concurrent_processes_keep_one_production_version_and_gapless_numbers(
    versions: RegisteredVersions,
) -> None:
    for run in ("r1", "r2", "r3"):
        versions.register(run)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROMOTES, str(ROOT), versions.database.url, str(n)],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in range(3)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    while any(process.poll() is None for process in processes):
        assert list(versions.stages().values()).count("production") <= 1
    errors = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], errors
    stages = versions.stages()
    assert list(stages.values()).count("production") == 1
    assert sorted(stages) == list(range(1, 3 + 45 + 1))
    # The events are consistent: each promotion replaced the one before it.
    serving = None
    for event in versions.events("model.promoted"):
        assert event.payload["replaced"] == serving
        serving = event.payload["version"]
    assert stages[serving or 0] == "production"
