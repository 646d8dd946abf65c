"""Dataset checks on the real graph: blocking checks, drift, leakage, and their records."""

import base64
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import dagster as dg
import pytest
from sqlalchemy import Connection

from hanzo_ml_assets.dataset_checks import OWN_TRAIN_SPLIT
from recipes.contracts.job import Job
from recipes.records.record_reader import iterate_record_lines
from recipes.storage.artifact_store import Store
from resources.compute.base import JobFailed
from resources.datasets.check_policy import Check
from resources.datasets.deletion import delete_version, output_transaction
from resources.datasets.validations import CHECKED_EVENT
from resources.metadata.database import Database
from resources.metadata.dataset_problems import FAILED_EVENT, find_problems
from resources.metadata.datasets import DatasetVersion
from resources.metadata.outbox import read_after
from tests.support.assets.checked_dataset import VERSION, Graph, rows, shown

CONTRACT = {"columns": {"instruction": {"type": "string", "unique": True}, "answer": {"type": "string", "max_length": 40}}}


@pytest.fixture
def graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Graph]:
    for name in [name for name in os.environ if name.startswith("HANZO_ML_") and not name.endswith("_PORT")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HANZO_ML_HOME", str(tmp_path / "home"))
    graph = Graph(tmp_path)
    with graph.instance:
        yield graph
    graph.plane.database.close()


def test_version_meeting_its_contract_passes_and_is_split(graph: Graph) -> None:
    result = graph.materialize(rows(60), contract=CONTRACT)
    assert result.success
    found = graph.validation()
    assert found.blocked == ""
    assert found.facts.violations.count == 0
    assert {verdict.check for verdict in found.verdicts if not verdict.passed} <= {"near_duplicates", "leakage"}
    assert set(graph.version().splits) == {"train", "validation", "test"}


def test_newest_record_time_is_shown_when_a_timestamp_column_is_configured(graph: Graph) -> None:
    content = [{**row, "made": f"2026-03-{day:02}T12:00:00Z"} for day, row in enumerate(rows(28), 1)]
    dated = graph.materialize([*content[9:], *content[:9]], measures={"timestamp": "made"})
    assert shown(dated)["newest_record"] == datetime(2026, 3, 28, 12, tzinfo=UTC).timestamp()
    assert "newest_record" not in shown(graph.materialize(content))


SVG = "{http://www.w3.org/2000/svg}"


def pictures(markdown: str) -> dict[str, tuple[list[str], list[tuple[float, float]]]]:
    """Return texts and bar sizes (width, height) of each chart, by name."""
    found = {}
    for name, encoded in re.findall(r"!\[(.*?)\]\(data:image/svg\+xml;base64,(.*?)\)", markdown):
        picture = ElementTree.fromstring(base64.b64decode(encoded))
        bars = [(float(bar.attrib["width"]), float(bar.attrib["height"])) for bar in picture.iter(f"{SVG}rect")]
        found[name] = ([str(text.text) for text in picture.iter(f"{SVG}text")], bars)
    return found


def test_record_statistics_are_shown_as_numbers_and_charts(graph: Graph) -> None:
    """30 records of 16 words, 10 of 11, two duplicates; every fourth has notes."""
    english = "The keeper of the lamp walks to the tower every evening, and he counts {} ships."
    dutch = "De wachter van lamp {} loopt elke avond naar de toren."
    texts = [english.format(n) for n in range(100, 130)] + [dutch.format(100 + n % 8) for n in range(10)]
    content = [{"text": text, "note": "seen" if n % 4 == 0 else None} for n, text in enumerate(texts)]
    found = shown(graph.materialize(content))
    assert found["duplicates"] == 2 and found["languages"] == {"en": 30, "nl": 10} and found["personal_data"] == {}
    assert found["mean_characters"] == sum(map(len, texts)) / 40
    assert found["distinct_words"] == len({word for text in texts for word in re.findall(r"\w+", text.lower())})
    assert found["columns"].splitlines()[2:] == ["| note | null, string | 25.0% |", "| text | string | 100.0% |"]
    assert "| duplicates | warn | 2 records (5.0%) are equal to an earlier record" in found["checks"]
    drawn = pictures(found["distributions"])
    assert list(drawn) == ["characters", "words", "vocabulary", "languages"]
    for name, title, least, most in (
        ("characters", "Characters of a record", len(dutch.format(100)), len(english.format(100))),
        ("words", "Words of a record", 11, 16),
    ):
        written, bars = drawn[name]
        assert written[:3] == [title, str(least), str(most)] and written[3].endswith("highest bar 75%")
        (_, few), (_, many) = bars
        assert few == pytest.approx(many / 3), "a quarter is left of three quarters"
    written, bars = drawn["vocabulary"]
    assert written[:5] == ["Most frequent words", "the", "90 (15.3%)", "lamp", "40 (6.8%)"] and len(bars) == 12
    assert [width / bars[0][0] for width, _ in bars[:2]] == pytest.approx([1, 40 / 90], abs=0.001)
    written, bars = drawn["languages"]
    assert written == ["Languages", "en", "30 (75.0%)", "nl", "10 (25.0%)"]
    assert [width / bars[0][0] for width, _ in bars] == pytest.approx([1, 1 / 3], abs=0.001)


def check_results(result: dg.ExecuteInProcessResult) -> dict[str, tuple[str, bool, str]]:
    """Return what Dagster shows of each check: asset, result, and severity."""
    return {
        each.check_name: (each.asset_key.path[-1], each.passed, each.severity.value)
        for each in result.get_asset_check_evaluations()
    }


def started(result: dg.ExecuteInProcessResult) -> list[str | None]:
    return [event.step_key for event in result.all_events if event.event_type == dg.DagsterEventType.STEP_START]


OF_RECORDS = {str(check): ("version", True, "WARN") for check in Check if check != Check.LEAKAGE}
OF_RECORDS |= {"contract": ("version", True, "ERROR")}
OF_SPLITS = {"no_leak": ("test", True, "ERROR"), "leakage": ("test", True, "WARN")}


@pytest.mark.parametrize(
    ("answer", "personal_data", "wrong"),
    [
        ("Door 3.", {}, {}),
        ("ann@example.com", {}, {"personal_data": "WARN"}),
        ("ann@example.com", {"severity": "error"}, {"personal_data": "ERROR"}),
    ],
)
def test_every_check_is_reported_and_nonblocking_failures_do_not_stop_splitting(
    graph: Graph, answer: str, personal_data: dict[str, Any], wrong: dict[str, str]
) -> None:
    content = rows(60)
    content[3]["answer"] = answer
    result = graph.materialize(content, contract=CONTRACT, checks={"personal_data": personal_data})
    assert check_results(result) == OF_RECORDS | OF_SPLITS | {name: ("version", False, bad) for name, bad in wrong.items()}
    assert ("1 email" in graph.verdict("personal_data")) is bool(wrong)
    assert result.success and graph.validation().blocked == ""
    assert set(graph.version().splits) == {"train", "validation", "test"}


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [(7, {"contract": "ERROR"}), ("ann@example.com", {"personal_data": "ERROR"})],
)
def test_blocking_failure_is_reported_with_the_other_checks_and_prevents_splitting(
    graph: Graph, answer: Any, wrong: dict[str, str]
) -> None:
    content = rows(60)
    content[3]["answer"] = answer
    block = {"personal_data": {"severity": "error", "blocking": True}}
    result = graph.materialize(content, contract=CONTRACT, checks=block)
    severe = OF_RECORDS | {"personal_data": ("version", True, "ERROR")}
    assert check_results(result) == severe | {name: ("version", False, bad) for name, bad in wrong.items()}
    assert not result.success and started(result) == [VERSION]


def test_check_or_split_failure_is_recorded_until_a_later_success(graph: Graph) -> None:
    def problem() -> str:
        with graph.plane.database.read() as connection:
            found = find_problems(connection, [graph.version().id])
        return found[graph.version().id].problem if found else ""

    unchecked = {"columns": {"answer": {"type": "string", "pattern": "(?=Door).*"}}}
    assert not graph.materialize(rows(60), contract=unchecked).success
    assert problem().startswith("could not be checked: contract.columns.answer.pattern: (?=Door).* is not supported")
    assert not graph.materialize(rows(60), split={"group_by": "colour"}).success
    assert "could not be split: no record has a value in the column 'colour'" in problem()
    assert graph.materialize(rows(60)).success
    assert problem() == ""
    with graph.plane.database.read() as connection:
        problems = [event.payload["problem"] for event in read_after(connection, 0, [FAILED_EVENT])]
    assert [reason[:20] for reason in problems] == ["could not be checked", "could not be split: "]


@pytest.mark.parametrize("at", ["dataset_checks", "datasets"])
def test_outputs_of_a_version_deleted_during_processing_are_removed(
    graph: Graph, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Its records are in the measurements, and in its splits."""

    @contextmanager
    def deleted_before(database: Database, store: Store, version: DatasetVersion, made: Any) -> Iterator[Connection]:
        delete_version(database, store, version.id, "ann")
        with output_transaction(database, store, version, made) as connection:
            yield connection

    monkeypatch.setattr(f"hanzo_ml_assets.{at}.output_transaction", deleted_before)
    result = graph.materialize(rows(60))
    assert not result.success
    failures = [str(event.event_specific_data) for event in result.all_events if event.is_step_failure]
    assert len(failures) == 1 and "dataset doors@1 was deleted while it was being examined" in failures[0]
    assert graph.plane.store.list("s3://hanzo-ml/datasets/") == []
    with graph.plane.database.read() as connection:
        assert find_problems(connection, ["doors@1"]) == {}


def test_version_deleted_during_a_failing_check_leaves_only_the_failure_reason(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing remains of its records, which the program still stored."""

    def fails(job: Job, _follower: Any) -> None:
        delete_version(graph.plane.database, graph.plane.store, graph.version().id, "ann")
        graph.plane.store.put_bytes(f"{job.outputs['statistics']}/statistics.json", b"with examples")
        raise JobFailed("its records are gone")

    monkeypatch.setattr(type(graph.plane.compute), "run", lambda _compute, job, follower: fails(job, follower))
    result = graph.materialize(rows(60))
    (failure,) = [str(event.event_specific_data) for event in result.all_events if event.is_step_failure]
    assert "its records are gone" in failure and "IntegrityError" not in failure
    assert graph.plane.store.list("s3://hanzo-ml/datasets/") == []


@pytest.mark.requirement("B13", "D1")
def test_contract_violation_names_the_line_and_prevents_splitting(graph: Graph) -> None:
    content = rows(60)
    content[41]["answer"] = 7
    result = graph.materialize(content, contract=CONTRACT)
    assert not result.success
    assert graph.version().splits == {}
    (violation,) = graph.validation().facts.violations.first
    assert (violation.line, violation.column, violation.reason) == (42, "answer", "must be string")
    assert "line 42, answer must be string" in graph.validation().blocked
    with graph.plane.database.read() as connection:
        (event,) = read_after(connection, 0, [CHECKED_EVENT])
    assert "contract" in event.payload["failed"]
    assert event.payload["blocked"] == graph.validation().blocked


@pytest.mark.slow
def test_version_is_unblocked_after_its_contract_was_corrected(graph: Graph) -> None:
    content = rows(60, extra=1)
    assert not graph.materialize(content, contract={"closed": True}).success
    assert graph.materialize(content).success
    assert graph.validation().blocked == ""
    assert set(graph.version().splits) == {"train", "validation", "test"}


@pytest.mark.requirement("D4")
@pytest.mark.slow
def test_drift_is_measured_against_the_dataset_of_the_production_model(graph: Graph) -> None:
    def of(country: str, start: int) -> list[dict[str, Any]]:
        return rows(100, start, country=country)

    assert graph.materialize(of("nl", 0)).success
    graph.serve(graph.version("doors@1"), "production")
    assert graph.materialize(of("nl", 1000)).success
    assert graph.validation().reference == "doors@1"
    assert graph.materialize([{**row, "answer": row["answer"] * 9, "new": True} for row in of("de", 2000)]).success
    assert graph.validation("doors@3").reference == "doors@1"  # and not the version before it
    drift = graph.verdict("drift")
    assert "length of answer moved from doors@1" in drift
    assert "country moved from doors@1" in drift and "new: de" in drift
    assert graph.verdict("schema_drift") == "new is new (boolean), doors@1 did not have it"


@pytest.mark.slow
def test_leaked_test_record_from_an_ancestors_training_is_named_and_can_block(graph: Graph) -> None:
    assert graph.materialize(rows(100)).success
    graph.serve(graph.version("doors@1"), "staging")
    block = {"leakage": {"severity": "error", "blocking": True}}
    result = graph.materialize(rows(100, 30), split={"seed": 7}, checks=block, leak_similarity={"threshold": 1.0})
    assert not result.success
    leaks = graph.validation("doors@2").leaks
    assert leaks is not None and leaks.exact > 0
    first = leaks.first[0]
    assert first.ancestor == "doors@1 train, of m@1"
    tested = list(iterate_record_lines(graph.plane.store, graph.version("doors@2").split("test")))
    trained = list(iterate_record_lines(graph.plane.store, graph.version("doors@1").split("train")))
    assert json.loads(tested[first.line - 1]) == json.loads(trained[first.ancestor_line - 1])
    assert "doors@1 train, of m@1" in graph.validation("doors@2").blocked


def test_near_duplicate_of_a_training_record_in_the_test_split_is_named(graph: Graph) -> None:
    """60 texts of 30 distinct words, each in two versions.

    A text leaks when one version is in the test split and the other in the training split.
    """

    def text(number: int, word: str) -> str:
        return " ".join(word if place == 15 else f"w{number}x{place}" for place in range(30))

    content = [{"text": text(number, word)} for number in range(60) for word in ("lamp", "lantern")]
    assert graph.materialize(content, leak_similarity={"threshold": 0.7}).success
    trained, tested = (
        [json.loads(line)["text"] for line in iterate_record_lines(graph.plane.store, graph.version().split(split))]
        for split in ("train", "test")
    )
    other = {text(n, a): text(n, b) for n in range(60) for a, b in (("lamp", "lantern"), ("lantern", "lamp"))}
    expected = {tested.index(each) + 1: trained.index(other[each]) + 1 for each in tested if other[each] in trained}
    leaks = graph.validation().leaks
    assert leaks is not None and expected
    assert {leak.line: leak.ancestor_line for leak in leaks.first} == expected
    assert {(leak.match, leak.ancestor) for leak in leaks.first} == {("near", OWN_TRAIN_SPLIT)}
    assert all(0.7 <= leak.similarity < 1 for leak in leaks.first)
    assert (leaks.exact, leaks.near, leaks.by_ancestor) == (0, len(expected), {OWN_TRAIN_SPLIT: len(expected)})
    assert f"{len(expected)} more nearly: {OWN_TRAIN_SPLIT} has {len(expected)}" in graph.verdict("leakage")
