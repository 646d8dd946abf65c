"""Registered models and versions: numbers, stages, serving, copies, organizations and concurrency."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count, pairwise
from pathlib import Path

import pytest

from recipes.contracts.job import StoreAddress
from recipes.storage.artifact_store import Store
from resources.errors import ErrorCode, HanzoError
from resources.metadata.database import Database
from resources.metadata.registry import deployments
from resources.metadata.registry.model_version_edits import ModelVersionEdits
from resources.metadata.registry.model_version_sources import CheckedSource, check_source
from resources.metadata.registry.registered_models import RegisteredModels
from resources.metadata.registry.search import RegistrySearch, page_versions
from resources.metadata.registry.version_lifecycle import ClientVersion
from tests.support.resources.model_versions import RegisteredVersions, model, refused


class Office(RegisteredVersions):
    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.models = RegisteredModels(self.database)
        self.edits = ModelVersionEdits(self.database)

    def point(self, name: str = "m", *, source: str = "s3://hanzo-models/x/v1", label: str = "") -> int:
        pointer = ClientVersion(source=source, created_by="ann", run_id="r", label=label)
        return self.registry.create(model(name), pointer).version

    def deploy(self, number: int, status: str) -> None:
        promotion = self.events("model.promoted")[-1].seq
        with self.database.write() as connection:
            row = deployments.begin_deployment(
                connection, model(), version=number, promotion=promotion, url="u", sha256="0" * 64
            )
            if status == "failed":
                deployments.mark_failed(connection, row, "no answer")
            elif status == "serving":
                deployments.mark_serving(connection, row)


@pytest.fixture
def office(database: Database) -> Office:
    office = Office(database)
    office.models.create(model("m"))
    return office


def test_promotion_of_a_pointer_is_recorded_as_not_servable(office: Office) -> None:
    office.point()
    office.register("r1")
    office.promote(1)
    office.promote(2)
    first, second = office.events("model.promoted")
    assert (first.payload["servable"], second.payload["servable"]) == (False, True)
    assert (second.payload["replaced"], second.payload["archived"]) == (1, [1])
    assert office.stages() == {1: "archived", 2: "production"}


def test_pointer_cannot_replace_a_deployed_version(office: Office) -> None:
    office.register("r1")
    office.promote(1)
    office.deploy(1, "serving")
    pointer = office.point()
    with pytest.raises(HanzoError, match=r"m version 2 has no file that the engine serves, and version 1 of m is deployed"):
        office.promote(pointer)
    assert office.stages()[1] == "production"
    office.models.create(model("other"))
    office.point("other")
    office.registry.promote(model("other"), 1, "production", user="ann")


def test_pointer_is_not_the_last_accepted_version(office: Office) -> None:
    office.register("r1")
    office.point()
    with office.database.read() as connection:
        accepted = office.registry.last_accepted(model(), connection)
    assert accepted is not None and accepted.version == 1


def test_version_restored_to_production_loses_its_canary_tags(office: Office) -> None:
    """It became a canary meanwhile, and MLflow's clients read the stage from the tags."""
    for run in ("r1", "r2"):
        office.register(run)
    for number, stage in ((1, "production"), (2, "production"), (1, "canary")):
        office.promote(number, stage)
    office.restore(2, 1)
    assert [version.tags for version in page_versions(office.database, model())[0]] == [{}, {}]
    assert office.stages() == {1: "production", 2: "staging"}


def test_quarantined_version_can_be_neither_aliased_nor_copied(office: Office, tmp_path: Path) -> None:
    """Regression: a loader could serve it by alias, and its copy was promotable without force."""
    store = Store(StoreAddress(root=tmp_path.as_uri(), buckets={}))
    office.register("r1", quarantine="accuracy is worse")

    def copy() -> CheckedSource:
        with office.database.read() as connection:
            return check_source(connection, store, "models:/m/1", "default")

    for way in (copy, partial(office.models.set_alias, model(), "champion", 1)):
        refusal = refused(way)
        assert refusal.code is ErrorCode.RESOURCE_CONFLICT and "quarantined: accuracy is worse" in refusal.message
    office.promote(1, "staging", force=True, is_admin=True)
    office.models.set_alias(model(), "champion", 1)
    assert copy().source == "models:/m/1", "an admin took it out"


@pytest.mark.requirement("O7", "Z5")
def test_a_canary_has_a_share_of_the_traffic_until_it_moves_on(office: Office) -> None:
    office.register("r1")
    assert office.promote(1, "canary").tags == {"hanzo.stage": "canary", "hanzo.traffic_percent": "10"}
    assert office.promote(1, "canary", traffic_percent=25).tags["hanzo.traffic_percent"] == "25"
    for percent in (0, 100):
        refused(office.promote, 1, "canary", traffic_percent=percent)
    assert refused(office.promote, 1, "production", traffic_percent=5).code is ErrorCode.INVALID_PARAMETER_VALUE
    assert office.promote(1, "production").tags == {}
    assert [event.payload["stage"] for event in office.events("model.promoted")] == ["canary", "canary", "production"]


def test_quarantined_version_cannot_become_a_canary(office: Office) -> None:
    office.register("r1", quarantine="worse")
    assert refused(office.promote, 1, "canary").code is ErrorCode.RESOURCE_CONFLICT


def test_archiving_a_stage_archives_the_others_in_it(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    for run in ("r1", "r2", "r3"):
        office.register(run)
    office.promote(1, "canary")
    monkeypatch.setattr("resources.metadata.registry.version_lifecycle.now_ms", count(10**13).__next__)
    office.promote(3, "staging", archive=("staging", "canary"))
    assert office.stages() == {1: "archived", 2: "archived", 3: "staging"}
    assert office.events("model.promoted")[-1].payload["archived"] == [1, 2]
    # One change has one timestamp, so that readers can correlate the changed versions.
    assert len({office.registry.read(model(), number).updated_at for number in (1, 2, 3)}) == 1


@pytest.mark.parametrize("status", ["", "deploying", "serving"])
def test_served_or_deploying_version_is_neither_deleted_nor_renamed(office: Office, status: str) -> None:
    for run in ("r1", "r2"):
        office.register(run)
    office.promote(1)
    if status:
        office.deploy(1, status)
    error = refused(office.edits.delete, model(), 1)
    assert error.code is ErrorCode.RESOURCE_CONFLICT and "hanzo-ml model undeploy m" in error.message
    assert "is served (version 1)" in refused(office.models.delete, model()).message
    assert "is served (version 1)" in refused(office.models.rename, model(), "n").message
    office.edits.delete(model("m"), 2)
    assert office.stages() == {1: "production"}


def test_renaming_a_model_moves_its_ended_deployments(office: Office) -> None:
    office.register("r1")
    office.promote(1)
    office.deploy(1, "failed")
    office.promote(1, "staging")
    office.models.rename(model("m"), "n")
    with office.database.read() as connection:
        moved = deployments.newest_by_version(connection, model("n"), [1])[1]
    assert (moved.name, moved.status) == ("n", "failed")


def test_version_numbers_of_a_name_are_never_reused(office: Office) -> None:
    for _ in range(3):
        office.point()
    office.models.create(model("other"))
    office.point("other")
    office.edits.delete(model("m"), 3)
    assert office.point() == 4
    office.models.delete(model("m"))
    office.models.rename(model("other"), "m")  # m's versions 1 to 4 were other files
    assert office.point() == 5
    office.models.create(model("other"))
    assert office.point("other") == 2


def test_copies_of_a_deleted_version_keep_its_files(office: Office) -> None:
    office.point(source="s3://hanzo-models/x/v7")
    office.point(source="models:/m/1")
    office.models.create(model("copies"))
    office.point("copies", source="models:/m/2")
    office.edits.delete(model("m"), 1)
    assert office.registry.read(model("m"), 2).source == "s3://hanzo-models/x/v7"
    office.models.delete(model("m"))
    assert office.registry.read(model("copies"), 1).source == "s3://hanzo-models/x/v7"


def test_model_names_are_case_sensitive(office: Office) -> None:
    office.models.create(model("M"))
    office.point(source="s3://hanzo-models/x/v7")
    office.point("M", source="models:/m/1")
    office.models.create(model("copies"))
    office.point("copies", source="models:/M/1")
    office.models.delete(model("m"))
    assert office.registry.read(model("copies"), 1).source == "models:/M/1"
    assert office.registry.read(model("M"), 1).source == "s3://hanzo-models/x/v7"


def test_version_is_found_by_the_label_of_its_caller(office: Office) -> None:
    assert office.point(label="3.1") == 1
    assert refused(office.point, label="3.1").code is ErrorCode.RESOURCE_ALREADY_EXISTS
    assert refused(office.point, label="3").code is ErrorCode.RESOURCE_CONFLICT
    assert office.point(label="2") == 2
    with office.database.read() as connection:
        found = office.registry.find_by_label(model("m"), "3.1", connection)
    assert found is not None and found.version == 1


def test_other_organization_can_neither_read_nor_change_a_model(office: Office) -> None:
    office.point()
    models, edits, registry = office.models, office.edits, office.registry
    pointer = ClientVersion(source="s3://hanzo-models/x", created_by="eve")
    evil = model("m", "evil")
    for call, arguments in (
        (models.get, (evil,)),
        (models.describe, (evil, "x")),
        (models.rename, (evil, "n")),
        (models.delete, (evil,)),
        (models.set_tag, (evil, "k", "v")),
        (models.delete_tag, (evil, "k")),
        (models.set_alias, (evil, "a", 1)),
        (models.delete_alias, (evil, "a")),
        (edits.describe, (evil, 1, "x")),
        (edits.set_tag, (evil, 1, "k", "v")),
        (edits.delete_tag, (evil, 1, "k")),
        (edits.delete, (evil, 1)),
        (registry.create, (evil, pointer)),
        (registry.read, (evil, 1)),
        (page_versions, (office.database, evil)),
    ):
        assert refused(call, *arguments).code is ErrorCode.RESOURCE_DOES_NOT_EXIST, call
    assert refused(registry.promote, evil, 1, "staging", user="eve").code is ErrorCode.RESOURCE_DOES_NOT_EXIST
    assert office.stages() == {1: "none"}


def test_models_of_one_name_in_two_organizations_are_independent(office: Office) -> None:
    """Numbers, stages, aliases, tags, copies, deletion and used version numbers are separate."""
    theirs = model("m", "rival")
    models, registry = office.models, office.registry
    for _ in range(2):
        office.point()
    models.create(theirs, tags={"of": "rival"})
    registry.create(theirs, ClientVersion(source="s3://hanzo-models/@rival/m/v1", created_by="eve"))
    copy = registry.create(theirs, ClientVersion(source="models:/m/1", created_by="eve"))
    models.set_alias(model(), "champion", 2)
    models.set_alias(theirs, "champion", 1)
    models.set_tag(model(), "of", "default")
    office.promote(1)
    registry.promote(theirs, 2, "production", user="eve")
    assert office.stages() == {1: "production", 2: "none"}
    assert [version.stage for version in page_versions(office.database, theirs)[0]] == ["production", "none"]
    assert (models.get(model()).aliases, models.get(theirs).aliases) == ({"champion": 2}, {"champion": 1})
    assert (models.get(model()).tags, models.get(theirs).tags) == ({"of": "default"}, {"of": "rival"})
    assert [version.aliases for version in page_versions(office.database, theirs)[0]] == [(), ("champion",)]
    for organization in ("default", "rival"):
        search = RegistrySearch(office.database, organization)
        assert {found.organization for found in search.models([], [], 10, None).models} == {organization}
        assert {found.organization for found in search.versions([], [], 10, None).versions} == {organization}
    office.promote(1, "archived")
    models.rename(model(), "n")
    assert registry.read(theirs, copy.version).source == "models:/m/1", "it is a copy of rival's own version"
    models.delete(model("n"))
    models.create(model())
    assert office.point() == 3
    registry.promote(theirs, 2, "archived", user="eve")
    models.delete(theirs)
    models.create(theirs)
    assert registry.create(theirs, ClientVersion(source="s3://x", created_by="eve")).version == 3


def test_every_change_has_its_event(office: Office) -> None:
    office.point()
    office.models.describe(model("m"), "d")
    office.models.set_tag(model("m"), "k", "v")
    office.models.delete_tag(model("m"), "k")
    office.models.set_alias(model("m"), "a", 1)
    office.models.delete_alias(model("m"), "a")
    office.edits.describe(model("m"), 1, "d")
    office.edits.set_tag(model("m"), 1, "k", "v")
    office.edits.delete_tag(model("m"), 1, "k")
    office.models.rename(model("m"), "n")
    office.edits.delete(model("n"), 1)
    office.models.delete(model("n"))
    types = [
        "model.created",
        "model.registered",
        "model.updated",
        "model.tag_set",
        "model.tag_deleted",
        "model.alias_set",
        "model.alias_deleted",
        "model.version_updated",
        "model.version_tag_set",
        "model.version_tag_deleted",
        "model.renamed",
        "model.version_deleted",
        "model.deleted",
    ]
    for type in types:
        assert len(office.events(type)) == 1, type


@pytest.mark.slow
def test_concurrent_promotions_and_registrations_keep_one_production_version(office: Office) -> None:
    """Eight threads: at most one in production, gapless numbers, no exception, consistent events."""
    threads, rounds = 8, 12
    for _ in range(threads):
        office.point()
    seen: list[int] = []

    def work(thread: int) -> None:
        for round in range(rounds):
            office.promote(1 + (thread + round) % threads)
            office.point() if round % 2 else office.register(f"{thread}-{round}")
            seen.append(list(office.stages().values()).count("production"))

    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(work, thread) for thread in range(threads)]:
            future.result()
    assert len(seen) == threads * rounds and set(seen) == {1}
    stages = office.stages()
    assert sorted(stages) == list(range(1, threads + threads * rounds + 1))
    story = [event.payload for event in office.events("model.promoted")]
    assert [later["replaced"] for _, later in pairwise(story)] == [earlier["version"] for earlier, _ in pairwise(story)]
    assert stages[story[-1]["version"]] == "production"
