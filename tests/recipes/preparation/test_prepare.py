"""The program prepare: reproducible with any processes and kills, complete, in bounded memory."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.contracts.job import BadConfiguration, Result
from recipes.contracts.parameters import NearDuplicates, PrepareParameters, SplitParameters, Toxicity
from recipes.contracts.rendering import Rendering
from recipes.contracts.validation_results import STATISTICS_FILE, Leaks, Statistics
from recipes.find_leaks import find_leaks
from recipes.preparation import encode_stage
from recipes.preparation.deduplication import choose_bands
from recipes.preparation.encode_stage import encoded_schema
from recipes.preparation.pipeline import REJECTED_FILE, run_pipeline
from recipes.preparation.plan import Plan, Range, cut_ranges, open_table, write_table
from recipes.preparation.read_stage import draw_ranks
from recipes.preparation.shuffle_plan import ShufflePlan
from recipes.preparation.shuffle_stage import PARTS_FOLDER, scatter_range
from recipes.preparation.source import Source
from recipes.preparation.split_assignment import SPLITS, draw_rank
from recipes.preparation.split_stage import SPLIT_STAGE
from recipes.preparation.text_filters import ToxicityFilter
from recipes.preparation.workers import Pods, Workers
from recipes.prepare import TABLES_VERSION, prepare
from recipes.records.record_layouts import Layout, detect_layout, read_question
from recipes.records.record_reader import normalize_text
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import canonical_json
from recipes.validate import validate
from tests.recipes.limited_memory import run_within
from tests.recipes.preparation.preparation_workspace import Place, questions, sha256
from tests.recipes.split_rows import divided
from tests.support.recipes.mixed_records import EVERYTHING, SMALL, mixed
from tests.support.s3_server import BUCKETS, VARIABLES, S3Server

ROOT = Path(__file__).resolve().parents[3]
OUT = "s3://hanzo-ml/datasets/d/prepared/checks"


@pytest.mark.requirement("C7")
@pytest.mark.slow
def test_output_bytes_are_independent_of_process_count(tmp_path: Path) -> None:
    place = Place(tmp_path, mixed(400), SMALL)
    made = [place.prepare({**EVERYTHING, "tokenize": place.tokenize(max_length=64)}, workers=count) for count in (1, 2, 3)]
    first, *others = [place.files(result) for result in made]
    assert sum(name.endswith(".arrow") for name in first) > 3
    assert all(other == first for other in others)
    assert made[0] == made[1] == made[2]


@pytest.mark.slow
def test_preparation_on_s3_writes_the_same_bytes_as_locally(tmp_path: Path, s3: S3Server) -> None:
    rows, wanted = mixed(400), {"augment": {"oversample_minority": True}}
    here = Place(tmp_path / "here", rows)
    there = Place(tmp_path / "there", rows, store=Store(s3.address, VARIABLES))
    expected, job = here.prepare({**wanted, "tokenize": here.tokenize()}), there.job({**wanted, "tokenize": here.tokenize()})
    (tmp_path / "job.json").write_text(job.model_dump_json())
    command = [sys.executable, "-m", "recipes.prepare", str(tmp_path / "job.json")]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **VARIABLES}, check=True)
    result = Result.model_validate_json(there.store.get_bytes(job.result_uri))
    assert there.files(result) == here.files(expected)
    assert (result.artifacts, result.facts) == (expected.artifacts, expected.facts)
    assert there.rows(result, "rejected") == here.rows(expected, "rejected")
    listed = s3.client.list_objects_v2(Bucket=BUCKETS["datasets"], Prefix="datasets/d/prepared/")["Contents"]
    folders = {found["Key"].split("/")[3] for found in listed}
    assert folders == {"all", "rejected", "result.json"}


@pytest.mark.requirement("C7")
@pytest.mark.slow
def test_killed_preparation_resumes_and_writes_the_same_bytes(tmp_path: Path) -> None:
    rows = mixed(1000)
    whole, killed = (Place(tmp_path / name, rows, SMALL) for name in ("whole", "killed"))
    expected = whole.prepare({"filter": {"language": "en"}})
    job = killed.job({"filter": {"language": "en"}}, workers=2)
    script = f"from functools import partial; from recipes.prepare import main, prepare;main(partial(prepare, **{SMALL}))"
    (tmp_path / "job.json").write_text(job.model_dump_json())
    kills = 0
    for stage in ("read", "encode", "scatter", None):
        process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "job.json")], cwd=ROOT)
        children: list[psutil.Process] = []
        while process.poll() is None and stage is not None:
            if any(killed.folder.glob(f"work/*/{stage}/*.{'arrow' if stage == 'scatter' else 'json'}")):
                children = psutil.Process(process.pid).children(recursive=True)
                os.kill(process.pid, signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.005)
        process.wait()
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not alive, "workers end with the process that started them"
    assert kills >= 2
    assert process.returncode == 0
    result = json.loads(killed.store.get_bytes(job.result_uri))
    assert {role: made["digest"] for role, made in result["artifacts"].items()} == {
        role: made.digest for role, made in expected.artifacts.items()
    }


@pytest.mark.requirement("D5")
def test_every_line_is_either_there_or_rejected_with_its_number_and_reason(tmp_path: Path) -> None:
    rows = mixed(600)
    place = Place(tmp_path, rows, SMALL)
    result = place.prepare({"filter": {"language": "en"}})
    rejects = place.rows(result, "rejected")
    assert len(rejects) + sum(result.metrics.values()) == len(rows)
    assert Counter(reject["reason"] for reject in rejects) == result.facts["rejected"]
    assert [reject["line"] for reject in rejects] == sorted(reject["line"] for reject in rejects)
    by_line = {reject["line"]: reject for reject in rejects}
    for line, row in enumerate(rows, start=1):
        if isinstance(row, bytes):
            assert by_line[line]["reason"] == ("not JSON" if row == b"not json" else "no layout")
        elif "id" in row:
            assert by_line[line] == {"file": "records.jsonl", "line": line, "reason": "duplicate", "detail": ""}


@pytest.mark.requirement("C2")
def test_output_is_masked_deduplicated_and_split_without_leaks(tmp_path: Path) -> None:
    place = Place(tmp_path, mixed(600), SMALL)
    result = place.prepare({})
    rows = place.rows(result)
    assert not any("@example.com" in json.dumps(row) for row in rows)
    masked = result.facts["masked"]
    assert isinstance(masked, dict) and isinstance(masked["email"], int)
    assert masked["email"] >= sum("[REDACTED]" in json.dumps(row) for row in rows) > 0
    splits = {name: place.rows(result, name) for name in SPLITS}
    asked = {name: {normalize_text(read_question(row, detect_layout(row))) for row in splits[name]} for name in SPLITS}
    assert not asked["train"] & (asked["validation"] | asked["test"])
    assert result.facts["leaked"] == 0
    assert len({json.dumps(row, sort_keys=True) for row in rows}) == len(rows)
    assert {name: len(splits[name]) for name in SPLITS} == {name: int(result.metrics[name]) for name in SPLITS}
    share = result.metrics["test"] / len(rows)
    assert share == pytest.approx(0.1, abs=0.01)


def test_column_retyped_by_masking_is_reported(tmp_path: Path) -> None:
    rows = [dict(row, paid=number, id=4111111111111110 + number) for number, row in enumerate(questions(60))]
    rows += [dict(questions(1, seed=3)[0], nested={"paid": [4111111111111111]}, id=1)]
    place = Place(tmp_path, rows)
    result = place.prepare({})
    assert result.facts["retyped"] == ["id"]
    assert {type(row["id"]) for row in place.rows(result)} == {int, str}
    assert result.facts["masked"] == {"card": 7}
    assert place.prepare({"augment": {"mask_pii": False}}).facts["retyped"] == []


@pytest.mark.requirement("C3")
@pytest.mark.slow
def test_record_order_depends_on_shuffle_seed(tmp_path: Path) -> None:
    place = Place(tmp_path, questions(200))
    orders = {}
    for seed in (None, 1, 2):
        result = place.prepare({"augment": {"shuffle_seed": seed}})
        orders[seed] = [row["instruction"] for row in place.rows(result, "train")]
    assert sorted(orders[1]) == sorted(orders[2]) == sorted(orders[None])
    assert orders[1] != orders[2]
    numbers = [int(text.rstrip("?").rpartition(" ")[2]) for text in orders[None]]
    assert numbers == sorted(numbers)


@pytest.mark.requirement("C3")
def test_minority_classes_are_oversampled_in_training_only(tmp_path: Path) -> None:
    rows = [dict(row, **{"class": "rare" if n % 9 == 0 else "often"}) for n, row in enumerate(questions(300))]
    place = Place(tmp_path, rows)
    result = place.prepare({"augment": {"oversample_minority": True}})
    classes = Counter(row["class"] for row in place.rows(result, "train"))
    assert classes["rare"] == classes["often"]
    assert result.facts["oversampled"] == {"rare": classes["often"] - len(rare_of(place.rows(result, "train")))}
    held_out = [json.dumps(row) for name in ("validation", "test") for row in place.rows(result, name)]
    assert len(held_out) == len(set(held_out))


def test_records_without_a_class_are_not_oversampled(tmp_path: Path) -> None:
    """Regression: records without a class counted as a class each and were repeated."""
    known = [{"class": "rare" if number % 9 == 0 else "often"} for number in range(280)]
    unknown: list[dict[str, Any]] = [{"class": None}, {"class": ""}, {}] * 6
    rows = [dict(row, **kind) for row, kind in zip(questions(298), known + unknown, strict=True)]
    place = Place(tmp_path, rows)
    result = place.prepare({"augment": {"oversample_minority": True}})
    train = place.rows(result, "train")
    classes = Counter(row.get("class") for row in train)
    assert classes["rare"] == classes["often"]
    assert set(result.facts["oversampled"]) == {"rare"}  # type: ignore[arg-type]
    others = [row["instruction"] for row in train if not row.get("class")]
    assert others and len(others) == len(set(others))


def test_kept_duplicates_are_shuffled_apart(tmp_path: Path) -> None:
    """Regression: copies were adjacent, so a model saw a record a hundred times in succession."""
    rows = [row for row in questions(60) for _ in range(20)]
    place = Place(tmp_path, rows, SMALL)
    result = place.prepare({"filter": {"dedup": False}})
    asked = [row["instruction"] for row in place.rows(result, "train")]
    follow = sum(first == second for first, second in pairwise(asked))
    assert len(asked) > 900 and follow < len(asked) / 10


def test_content_digest_matches_recorded_tables_version(tmp_path: Path) -> None:
    """If the output for equal input changes on purpose, increment `TABLES_VERSION` with this digest."""
    rows = [*mixed(300), *({**row, "class": None} for row in questions(40, seed=2))]
    place = Place(tmp_path, rows, SMALL)
    result = place.prepare({"filter": {"dedup": False, "near_dedup": {}}, "augment": {"oversample_minority": True}})
    assert (TABLES_VERSION, str(result.facts["content_sha256"])[:12]) == (4, "6d2b85c2c0f7")


def test_oversampled_copies_do_not_multiply_memory(tmp_path: Path) -> None:
    """Regression: all copies together took many times the memory of their range."""
    plan = Plan(tmp_path, (Range("records.jsonl", 0, 1),), PrepareParameters())
    only = {"record": b"x" * 20_000, "digest": bytes(16), "group": "", "class": "rare"}
    fields = encoded_schema(plan.parameters)
    batch = pa.RecordBatch.from_pylist([{field.name: only.get(field.name, 0) for field in fields}], fields)
    write_table(plan.place(encode_stage.STAGE, 0, "arrow"), fields, [batch])
    (tmp_path / SPLIT_STAGE).mkdir()
    copies = 5000
    np.save(plan.place(SPLIT_STAGE, 0, "npy"), np.array([[SPLITS.index("train")], [copies]], dtype=np.int32))
    usual, counted = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(counted)
    try:
        scatter_range(plan, (1, 1, 1), ShufflePlan(ranges=1, pods=1, fan=2, parts=3), 0)
    finally:
        pa.set_memory_pool(usual)
    assert len(open_table(plan.place("scatter", 0, "arrow"))) == copies
    assert 0 < counted.max_memory() < len(only["record"]) * copies / 3


def rare_of(rows: list[dict[str, Any]]) -> set[str]:
    return {row["instruction"] for row in rows if row["class"] == "rare"}


@pytest.mark.requirement("B16")
def test_splits_can_be_read_from_a_column(tmp_path: Path) -> None:
    names = ["train", "val", "test", "dev"]
    rows = [dict(row, part=names[n % 4]) for n, row in enumerate(questions(80))] + [dict(questions(1)[0], part="other")]
    place = Place(tmp_path, rows)
    result = place.prepare({"split": {"column": "part"}, "filter": {"dedup": False}})
    assert result.metrics == {"train": 20.0, "validation": 40.0, "test": 20.0}
    assert result.facts["rejected"] == {"split": 1}


@pytest.mark.slow
def test_group_by_column_without_values_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match="no record has a value in the column 'clas'"):
        Place(tmp_path, questions(60)).prepare({"split": {"group_by": "clas"}})


def lengths_in(place: Place, result: Result, cache: Path) -> list[int]:
    """Return the token counts of the records of all splits."""
    folders = [place.store.fetch(result.artifacts[name], cache) for name in SPLITS]
    found = [open_table(file).column("length").to_pylist() for folder in folders for file in folder.glob("*.arrow")]
    return [length for part in found for length in part]


@pytest.mark.requirement("C1", "C2")
def test_lengths_are_counted_in_tokens(tmp_path: Path) -> None:
    """Both bounds are inclusive; truncation follows the length filter."""
    place = Place(tmp_path, questions(200))
    tokenizer = place.tokenize()
    counted = place.prepare({"tokenize": tokenizer})
    lengths = sorted(lengths_in(place, counted, tmp_path / "counted"))
    least, most = lengths[len(lengths) // 4], lengths[3 * len(lengths) // 4]
    assert least < most
    result = place.prepare({"tokenize": tokenizer, "filter": {"min_length": least, "max_length": most}})
    assert sorted(lengths_in(place, result, tmp_path / "within")) == [n for n in lengths if least <= n <= most]
    details = [row["detail"] for row in place.rows(result, "rejected")]
    assert sorted(details) == sorted(
        [f"{n} tokens, min_length is {least}" for n in lengths if n < least]
        + [f"{n} tokens, max_length is {most}" for n in lengths if n > most]
    )
    asked = {"tokenize": place.tokenize(max_length=48), "filter": {"min_length": 60, "max_length": 120}}
    result = place.prepare(asked)
    folder = place.store.fetch(result.artifacts["train"], tmp_path)
    written = np.concatenate([open_table(file).column("length").to_numpy() for file in folder.glob("*.arrow")])
    assert written.min() == 48
    assert written.max() == 48
    assert set(result.facts["rejected"]) >= {"too short", "too long"}  # type: ignore[arg-type]


@pytest.mark.requirement("C1")
@pytest.mark.slow
def test_padding_extends_every_record_to_max_length(tmp_path: Path) -> None:
    place = Place(tmp_path, questions(60))
    result = place.prepare({"tokenize": place.tokenize(max_length=64, padding=True)})
    folder = place.store.fetch(result.artifacts["train"], tmp_path)
    table = open_table(folder / "train-00000.arrow")
    assert {len(ids) for ids in table.column("input_ids").to_pylist()} == {64}
    assert table.column("length").to_numpy().min() < 64


@pytest.mark.slow
def test_content_digest_depends_on_tokenization(tmp_path: Path) -> None:
    made = []
    for number, length in enumerate((512, 256, 512)):
        place = Place(tmp_path / str(number), questions(60))
        made.append(place.prepare({"tokenize": place.tokenize(max_length=length, padding=True)}))
        records = [uri for uri in place.store.list("s3://hanzo-ml/datasets/d/prepared/all") if uri.endswith(".jsonl")]
        assert sorted(records) == sorted(
            f"{made[-1].artifacts['dataset'].uri}/{file.path}"
            for file in place.store.manifest(made[-1].artifacts["dataset"]).files
        ), "each record lies there once"
    assert made[0].metrics == made[1].metrics
    first, second, third = (result.facts["content_sha256"] for result in made)
    assert first == third != second


@pytest.mark.requirement("C2")
def test_other_languages_and_listed_words_are_rejected(tmp_path: Path) -> None:
    german = {"text": "Der Leuchtturmwärter zählt jede Nacht die Schiffe, die am Hafen vorbeifahren, und schreibt sie auf."}
    rude = {"text": "The keeper of the lighthouse is a damned fool, and everybody in the harbour knows about it."}
    place = Place(tmp_path, [*questions(60), german, rude])
    result = place.prepare({"filter": {"language": "en", "toxicity": {"words": ["Damned"]}}})
    reasons = {reject["line"]: (reject["reason"], reject["detail"]) for reject in place.rows(result, "rejected")}
    assert reasons[61][0] == "language"
    assert reasons[61][1].startswith("de by 0.")
    assert reasons[62] == ("toxicity", "a word of the list")


@pytest.mark.parametrize("word", ["d*mned", "d***", "@ss", "c++", "rude word"])
def test_toxic_word_ending_in_punctuation_is_matched(word: str) -> None:
    """Regression: a word ending in a star never matched, so such records were kept."""
    found = ToxicityFilter(Toxicity(words=(word,)))
    assert found.problem(f"He is a {word.upper()}, they say.") == found.problem(word) == "a word of the list"
    assert found.problem(f"x{word}") is found.problem(f"{word}x") is None


@pytest.mark.requirement("D1")
def test_an_installed_detector_rejects_from_its_threshold_on(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = ModuleType("detector_of_the_operator")
    installed.score = lambda text: 0.5 if "storm" in text else 0.49  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, installed.__name__, installed)
    there = EntryPoints([EntryPoint("mine", "detector_of_the_operator:score", "hanzo_ml.toxicity")])
    monkeypatch.setattr("recipes.preparation.text_filters.entry_points", lambda group: there.select(group=group))
    by_default = ToxicityFilter(Toxicity(detector="mine"))
    assert (by_default.problem("a storm"), by_default.problem("a calm")) == ("score 0.50", None)
    assert ToxicityFilter(Toxicity(detector="mine", threshold=0.51)).problem("a storm") is None
    assert ToxicityFilter(Toxicity(detector="mine", threshold=0.2)).problem("a calm") == "score 0.49"


def test_an_unknown_detector_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match="unknown detector 'no-such'"):
        Place(tmp_path, questions(30)).prepare({"filter": {"toxicity": {"detector": "no-such"}}})


def test_near_duplicates_are_rejected_and_other_records_kept(tmp_path: Path) -> None:
    rows = questions(100)
    long = " ".join(row["answer"] for row in rows[:10])
    near = [{"text": long}, {"text": long.replace("lamp", "light", 1)}]
    result = Place(tmp_path, [*rows, *near]).prepare({"filter": {"near_dedup": {"threshold": 0.8}}})
    assert result.facts["rejected"] == {"near duplicate": 1}


@pytest.mark.parametrize("threshold", [0.5, 0.8, 0.95, 1.0])
def test_minhash_bands_find_95_percent_of_pairs_at_threshold(threshold: float) -> None:
    bands, rows = choose_bands(NearDuplicates(threshold=threshold))
    assert bands * rows <= 128
    assert 1 - (1 - threshold**rows) ** bands >= 0.95


def test_range_size_does_not_change_output_files(tmp_path: Path) -> None:
    place = Place(tmp_path, mixed(300))
    source = Source(place.store, place.dataset, tmp_path)
    made = []
    for number, size in enumerate((100, 5_000, 1 << 20)):  # the first is less than a line
        plan = Plan(tmp_path / str(number), cut_ranges(source.files.values(), size), PrepareParameters())
        with Workers(1) as workers:
            run_pipeline(plan, source, workers, Pods())
        files = [*(plan.work / PARTS_FOLDER).rglob("*.jsonl"), plan.work / REJECTED_FILE]
        made.append({file.name: sha256(file) for file in files})
    assert made[0] == made[1] == made[2]


@pytest.mark.parametrize(
    ("rows", "reasons"),
    [
        ([], "the dataset is empty$"),
        ([{"instruction": "a", "output": "b"}] * 3, "3 no layout; the first: .*, line 1: has none of .* rename 'output'"),
    ],
)
def test_preparation_leaving_no_record_is_refused_with_the_reasons(
    tmp_path: Path, rows: list[dict[str, Any]], reasons: str
) -> None:
    with pytest.raises(BadConfiguration, match=f"no record is left: {reasons}"):
        Place(tmp_path, rows).prepare({})


def test_an_unknown_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match=r"tokenize\.tokenizer: there is no folder /no/such"):
        Place(tmp_path, questions(30)).prepare({"tokenize": {"tokenizer": "file:///no/such"}})


MEGABYTES = 400
LIMIT = 500 << 20
"""Data memory of each process: Python and its libraries take about 150 MB, parts of running uploads 100 MB."""


@pytest.mark.slow
def test_an_input_larger_than_its_memory_is_prepared(tmp_path: Path) -> None:
    """The input is larger than the memory available to each process."""

    def rows() -> Iterator[dict[str, Any]]:
        draw = np.random.default_rng(1)
        for number in range(MEGABYTES * 16):
            yield {"text": f"{number} " + bytes(draw.integers(97, 123, 65_000, dtype=np.uint8)).decode()}

    place = Place(tmp_path, rows())
    (tmp_path / "job.json").write_text(place.job({"augment": {"mask_pii": False}}).model_dump_json())
    done = run_within(LIMIT, "recipes.prepare", tmp_path / "job.json")
    assert done.returncode == 0, done.stderr
    result = json.loads(place.store.get_bytes(place.job({}).result_uri))
    assert sum(result["metrics"].values()) == MEGABYTES * 16


def test_preference_records_keep_their_layout_without_tokenization(tmp_path: Path) -> None:
    rows = [{"prompt": f"Question {n}?", "chosen": "Yes.", "rejected": "No."} for n in range(30)]
    result = Place(tmp_path, rows).prepare({})
    assert sum(result.metrics.values()) == 30
    assert detect_layout(rows[0]) is Layout.PREFERENCE
    assert canonical_json(result.facts["rejected"]) == b"{}"


@given(st.text(st.characters(codec="utf-8")) | st.text(st.characters(codec="ascii")))
def test_question_rank_is_equal_in_split_and_prepare(asked: str) -> None:
    assert draw_ranks([asked], 42) == [draw_rank(normalize_text(asked), 42)]


def test_prepared_version_holds_out_the_same_records_as_its_parent(tmp_path: Path) -> None:
    rows = questions(200)
    places, _ = divided(rows, SplitParameters())
    held_out = [row for row, place in zip(rows, places, strict=True) if SPLITS[place] == "test"]
    place = Place(tmp_path, rows)
    found = place.rows(place.prepare({}), "test")
    assert sorted(row["instruction"] for row in found) == sorted(row["instruction"] for row in held_out)


def test_prepared_version_passes_validation_and_leakage_check(tmp_path: Path) -> None:
    """Its records are stored in the folders of its splits."""
    place = Place(tmp_path, questions(60))
    made = place.prepare({})
    job = place.job({}).model_copy(update={"outputs": {name: f"{OUT}/{name}" for name in ("statistics", "leaks")}})
    checked = validate(job.model_copy(update={"inputs": {"dataset": made.artifacts["dataset"]}}), place.store, tmp_path)
    statistics = place.store.get_bytes(f"{checked.artifacts['statistics'].uri}/{STATISTICS_FILE}")
    assert Statistics.model_validate_json(statistics).records == 60
    inputs = {"test": made.artifacts["test"], "ancestor": made.artifacts["dataset"]}
    leaks = find_leaks(job.model_copy(update={"inputs": inputs}), place.store, tmp_path)
    assert Leaks.model_validate(leaks.facts).exact == made.metrics["test"] > 0


def calling(number: int, arguments: dict[str, Any]) -> dict[str, Any]:
    call = {"type": "function", "index": 0, "function": {"name": "f", "arguments": arguments}}
    asked = {"role": "user", "content": f"Question {number}?"}
    return {"messages": [asked, {"role": "assistant", "content": "", "tool_calls": [call]}]}


def test_argument_order_is_kept_and_unread_keys_are_counted(tmp_path: Path) -> None:
    """Calls that differ only in order are both kept, because a model learns the order."""
    rows = [calling(number, {"where": "Lund", "day": number}) for number in range(20)]
    other = calling(0, {"day": 0, "where": "Lund"})
    lines = [json.dumps(row).encode() for row in (*rows, other, rows[1])]
    place = Place(tmp_path, lines)
    result = place.prepare({"tokenize": place.tokenize()})
    assert result.facts["rejected"] == {"duplicate": 1}
    assert result.facts["unread"] == {"messages.tool_calls.index": 22}
    found = [row["messages"][1]["tool_calls"][0]["function"]["arguments"] for row in place.rows(result)]
    assert sorted(list(each) for each in found) == [["day", "where"], *[["where", "day"]] * 20]


def test_preparation_begun_with_older_rendering_is_refused(tmp_path: Path) -> None:
    place = Place(tmp_path, [calling(number, {}) for number in range(3)])
    job = place.job({}).model_copy(update={"rendering": Rendering.AS_STORED})
    with pytest.raises(BadConfiguration, match="job prepare was begun by an earlier release"):
        prepare(job, place.store, tmp_path / "work")
