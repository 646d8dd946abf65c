"""Training data of a model: used splits, their versions, and who checked for personal data."""

import json
from pathlib import Path

import pytest

from hanzo_ml.cli.lineage import print_data
from resources.lineage.edges import record_artifact
from resources.lineage.run_record import log_dataset_input, write_command_record
from resources.lineage.training_data import Included
from resources.metadata.datasets import DatasetVersion
from resources.metadata.jobs import COMMAND
from resources.metadata.tracking.run_inputs import Dataset, DatasetInput, Inputs
from tests.support.resources.lineage import World, rows, small
from tests.support.resources.training_data import asked

__all__ = ["small"]


def validated(world: World, version: DatasetVersion, **kinds: int) -> None:
    """Record a validation of a version."""
    folder = world.folder / "statistics" / version.id
    folder.mkdir(parents=True)
    folder.joinpath("statistics.json").write_text(json.dumps({"records": version.num_records, "personal_data": kinds}))
    uri = f"{version.storage_path}statistics/x"
    made = world.store.publish(folder, uri, "statistics", inputs={"dataset": version.artifact.digest})
    with world.database.write() as connection:
        record_artifact(connection, made, world.store.manifest(made))


@pytest.mark.requirement("B10", "O11")
def test_used_datasets_are_listed_with_their_counts(small: World) -> None:
    version = small.create(rows(40))
    small.create(rows(40, first=100), "unused")
    small.model("m", "r1", small.run("r1", version, small.split(version)))
    found = asked(small)
    (use,) = found.datasets
    assert (use.dataset, use.records, use.splits) == ("d@1", 40, {"test": 4, "train": 32, "validation": 4})
    assert use.personal_data.included is found.personal_data is Included.NOT_EXAMINED


def test_data_of_a_starting_model_counts_and_that_of_a_compared_model_does_not(small: World) -> None:
    versions = [small.create(rows(30, first=100 * n), name) for n, name in enumerate(("first", "compared", "later"))]
    splits = [small.split(version) for version in versions]
    exports = small.model("m", "r1", small.run("r1", versions[0], splits[0]))
    compared = small.run("r2", versions[1], splits[1])
    adapter = small.run("r3", versions[2], splits[2], base=exports["merged"])
    small.publish("s3://hanzo-ml/runs/r3/evaluation-2", "evaluation", {"adapter": adapter, "accepted": compared})
    small.model("n", "r3", adapter)
    assert [use.dataset for use in asked(small, "n").datasets] == ["first@1", "later@1"]


@pytest.mark.requirement("B8")
@pytest.mark.parametrize(("kinds", "answer"), [({}, Included.NOT_FOUND), ({"email": 3, "phone": 0}, Included.FOUND)])
def test_validation_decides_whether_personal_data_was_included(
    small: World, kinds: dict[str, int], answer: Included
) -> None:
    version = small.create(rows(30))
    validated(small, version, **kinds)
    small.model("m", "r1", small.run("r1", version, small.split(version)))
    found = asked(small)
    assert found.personal_data is answer
    assert found.datasets[0].personal_data.found == {kind: count for kind, count in kinds.items() if count}


def test_masked_personal_data_is_counted_by_kind(small: World) -> None:
    raw = [{"text": f"write to n{n}@example.org"} for n in range(30)]
    masked = [{"instruction": f"write {n}", "answer": "to [REDACTED]"} for n in range(30)]
    source = small.create(raw, "raw")
    validated(small, source, email=30)
    prepared = small.derive(source, masked, raw, "masked", masked={"email": 30})
    small.model("m", "r1", small.run("r1", prepared, small.split(prepared)))
    found = asked(small)
    assert {use.dataset: use.personal_data.included for use in found.datasets} == {
        "masked@1": Included.MASKED,
        "raw@1": Included.FOUND,
    }
    assert found.personal_data is Included.MASKED
    assert next(use for use in found.datasets if use.dataset == "raw@1").splits == {}


def test_dataset_given_to_a_command_is_its_training_data(small: World) -> None:
    """The whole version is listed once, next to a dataset that its script logged."""
    version = small.create(rows(30))
    validated(small, version, email=2)
    config = {"type": "training", "command": ["python", "train.py"], "dataset": version.reference}
    job = small.jobs.submit(name="r1", config=config, user="u", organization="default", id="r1", type=COMMAND)
    for _ in range(2):  # it was restarted
        made = write_command_record(small.store, job, {"dataset": version.artifact})
        log_dataset_input(small.database, job, version)
    Inputs(small.database).log("r1", [DatasetInput(Dataset("own", "d1", "local", "/data"), {})])
    with small.database.write() as connection:
        record_artifact(connection, made, small.store.manifest(made))
    small.model("m", "r1", small.publish("s3://hanzo-ml/runs/r1/artifacts/model", "adapter", {}))
    found = asked(small)
    (use,) = found.datasets
    assert (use.dataset, use.splits, found.personal_data) == ("d@1", {"train": 30}, Included.FOUND)
    assert [logged.name for logged in found.logged] == ["own"]


def test_model_of_files_alone_has_no_known_training_data(small: World, tmp_path: Path) -> None:
    weights = small.publish("s3://hanzo-models/given/weights", "adapter", {})
    small.model("m", "r1", weights)
    found = asked(small)
    assert (found.datasets, found.personal_data) == ([], Included.NOT_EXAMINED)


def test_training_data_is_printed_in_readable_form(small: World, capsys: pytest.CaptureFixture[str]) -> None:
    version = small.create(rows(40))
    small.model("m", "r1", small.run("r1", version, small.split(version)))
    print_data(asked(small).model_dump(mode="json"))
    printed = capsys.readouterr().out
    for expected in ("m version 1", "d@1 40 records", "train: 32 records", "personal data: not examined"):
        assert expected in printed
