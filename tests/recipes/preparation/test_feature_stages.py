"""Features of a prepared version: training and serving give bit-identical values."""

import json
import statistics
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from recipes.contracts.job import BadConfiguration, Result
from recipes.contracts.parameters import FeatureParameters, PrepareParameters
from recipes.preparation import pipeline
from recipes.preparation.feature_statistics import ExactMoments
from recipes.records import key_index
from recipes.records.features import ONLINE_FILE, ONLINE_INDEX_FILE, STATE_FILE, FeatureState, UncleanRecord, serve_features
from tests.recipes.preparation.preparation_workspace import Place, questions
from tests.support.recipes.feature_table import FEATURES, table

SMALL = {"range_bytes": 5_000, "part_bytes": 10_000}


class Served:
    """Features as a server reads them from a version's files."""

    def __init__(self, place: Place, result: Result) -> None:
        folder = place.store.fetch(result.artifacts["features"], place.folder / "cache")
        self.state = FeatureState.model_validate_json((folder / STATE_FILE).read_bytes())
        self._lines, self._index = (
            key_index.make_file_reader(folder / ONLINE_FILE),
            key_index.make_file_reader(folder / ONLINE_INDEX_FILE),
        )
        self._size = (folder / ONLINE_INDEX_FILE).stat().st_size

    def find(self, key: str) -> Any:
        found = key_index.find_by_key(key, self._lines, self._index, self._size)
        return found and found["features"]

    def aggregate(self, row: dict[str, Any]) -> dict[str, Any]:
        return serve_features(self.state, row, self.find)


@pytest.mark.requirement("C5")
def test_training_features_equal_served_features_of_the_raw_row(tmp_path: Path) -> None:
    rows = table(300)
    place = Place(tmp_path, rows, SMALL)
    clean = {"fill": {"age": 41.5, "spend": 0}, "within": {"score": {"min": 0.02}}, "required": ["plan"]}
    result = place.prepare({"features": FEATURES, "clean": clean})
    made, served = place.rows(result), Served(place, result)
    assert len(made) > 150
    for row in made:
        assert json.dumps(served.aggregate(rows[row["row"]]), sort_keys=True) == json.dumps(row["features"], sort_keys=True)
    for row in rows:
        if row["row"] not in {each["row"] for each in made}:
            with pytest.raises(UncleanRecord):
                served.aggregate(row)


@pytest.mark.requirement("C6")
def test_scales_use_training_records_and_aggregates_use_all(tmp_path: Path) -> None:
    place = Place(tmp_path, table(300), SMALL)
    result = place.prepare({"features": FEATURES})
    train, everything, served = place.rows(result, "train"), place.rows(result), Served(place, result)
    ages = [Fraction(row["age"]) for row in train if row["age"] is not None]
    assert served.state.scales["age"].shift == float(sum(ages) / len(ages))
    assert served.state.scales["age"].unit == pytest.approx(statistics.pstdev(map(float, ages)))
    assert served.state.categories == {"city": ("1", "2", "Oslo", "true"), "plan": ("free", "pro")}
    for row in everything:
        spent = [Fraction(other["spend"]) for other in everything if other["customer"] == row["customer"]]
        exact = {"count": len(spent), "sum": float(sum(spent)), "mean": float(sum(spent) / len(spent))}
        exact |= {"min": float(min(spent)), "max": float(max(spent))}
        assert {f"spend.{name}": value for name, value in exact.items()}.items() <= row["features"].items()
        assert served.find(row["customer"])["spend.count"] == len(spent)


def test_online_lookup_returns_last_record_of_a_key_in_input_order(tmp_path: Path) -> None:
    rows = table(300)
    place = Place(tmp_path, rows, SMALL)
    result = place.prepare({"features": FEATURES})
    made = {row["row"]: row["features"] for row in place.rows(result)}
    served = Served(place, result)
    for customer, last in {row["customer"]: row["row"] for row in rows}.items():
        assert served.find(customer) == made[last]
    assert served.find("nobody") is None


@pytest.mark.slow
def test_feature_files_are_independent_of_process_count(tmp_path: Path) -> None:
    place = Place(tmp_path, table(300), SMALL)
    one, two = (place.prepare({"features": FEATURES}, workers=count) for count in (1, 2))
    assert place.files(one) == place.files(two) and one == two
    assert {f"features/{name}" for name in (STATE_FILE, ONLINE_FILE, ONLINE_INDEX_FILE)} <= place.files(one).keys()


def test_unseen_values_have_declared_features(tmp_path: Path) -> None:
    place = Place(tmp_path, table(200), SMALL)
    served = Served(place, place.prepare({"features": FEATURES}))
    unknown = {"plan": "gold", "city": "Rome", "customer": "nobody", "score": 7}
    assert served.aggregate(unknown)["score"] > 1, "beyond what was fitted"
    for row in (unknown, {"plan": None, "city": " ", "age": None}, {}):
        found = served.aggregate(row)
        assert (found["plan=free"], found["plan=pro"], found["city"], found["age"]) == (0, 0, -1, None)
        assert (found["spend.count"], found["spend.sum"], found["spend.max"]) == (0, None, None)


def test_non_numeric_feature_value_is_rejected_with_its_line(tmp_path: Path) -> None:
    rows = table(100)
    rows[3]["age"], rows[5]["spend"], rows[7]["plan"], rows[9]["customer"], rows[11]["age"] = "old", "1,5", {}, [], True
    rows[13]["spend"] = " 1.5e1 "
    place = Place(tmp_path, rows)
    result = place.prepare({"features": FEATURES})
    assert Served(place, result).find(rows[13]["customer"])["spend.count"] >= 1
    assert result.facts["rejected"] == {"no category": 2, "no number": 3}
    details = {reject["line"]: reject["detail"] for reject in place.rows(result, "rejected")}
    assert details[4].startswith("'age' is not a number") and details[6].startswith("'spend' is not a number")
    assert details[8] == "'plan' is neither a text nor a number" and details[10].startswith("'customer'")


def test_personal_data_as_feature_key_is_rejected_when_masking(tmp_path: Path) -> None:
    """Masking would turn all customers into one."""
    rows = [*table(60), {"row": 60, "customer": "ann@example.com"}]
    place = Place(tmp_path, rows)
    hidden = place.prepare({"features": FEATURES})
    assert hidden.facts["rejected"] == {"masked feature": 1}
    shown = place.prepare({"features": FEATURES, "augment": {"mask_pii": False}})
    assert Served(place, shown).find("ann@example.com")["spend.count"] == 0


def test_tokenized_records_keep_their_features(tmp_path: Path) -> None:
    rows = [{**text, **row} for text, row in zip(questions(80), table(80), strict=True)]
    place = Place(tmp_path, rows)
    result = place.prepare({"features": FEATURES, "tokenize": place.tokenize()})
    served = Served(place, result)
    assert all(row["features"] == served.aggregate(rows[row["row"]]) for row in place.rows(result))
    assert any(name.endswith(".arrow") for name in place.files(result))
    without = place.prepare({"tokenize": place.tokenize()})
    assert "features" not in without.artifacts


@pytest.mark.slow
def test_feature_merge_resumes_after_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(tmp_path, table(300), SMALL)
    whole = place.prepare({"features": FEATURES})
    write = key_index.write_key_index

    def dies(*given: Any) -> None:
        write(*given)
        given[0].with_name(f"{ONLINE_FILE}.1.part").touch()  # left behind by another process
        raise KeyboardInterrupt

    monkeypatch.setattr(key_index, "write_key_index", dies)
    with pytest.raises(KeyboardInterrupt):
        place.prepare({"features": FEATURES})
    monkeypatch.setattr(pipeline.feature_stages, "fit_range", dies)  # completed before, so it must not run again
    monkeypatch.setattr(key_index, "write_key_index", write)
    monkeypatch.setattr(pipeline, "run_stage", only_undone(pipeline.run_stage))
    assert place.files(place.prepare({"features": FEATURES})) == place.files(whole)


def only_undone(share: Any) -> Any:
    def shared(workers: Any, done: str, unit: Any, calls: Any, noun: str = "ranges") -> None:
        if done != "fitted":
            share(workers, done, unit, calls, noun)

    return shared


@pytest.mark.parametrize("fan", [2, pytest.param(3, marks=pytest.mark.long)])
def test_feature_files_are_independent_of_merge_rounds(tmp_path: Path, fan: int) -> None:
    place, often = (
        Place(tmp_path / str(units["fan"]), table(300), units) for units in (SMALL | {"fan": 99}, SMALL | {"fan": fan})
    )
    assert place.files(place.prepare({"features": FEATURES})) == often.files(
        often.prepare({"features": FEATURES}, workers=2)
    )


@pytest.mark.parametrize(
    ("rows", "features", "words"),
    [
        ([{"row": n, "age": None} for n in range(30)], {"columns": {"age": {"normalize": "standard"}}}, "remove it"),
        ([{"row": n} for n in range(3000)], {"columns": {"row": {"encode": "one_hot"}}}, "more than 1000 categories"),
        (
            [{"row": n, "a": "b", "a=b": 1} for n in range(30)],
            {"columns": {"a": {"encode": "one_hot"}, "a=b": {"normalize": "min_max"}}},
            "has the same name as a category's feature: rename",
        ),
        ([{"row": n, "k": 1, "x": 1e308} for n in range(30)], {"key": "k", "aggregate": {"x": ["sum"]}}, "exceeds 64-bit"),
    ],
    ids=["none", "many", "name", "sum"],
)
def test_unfittable_features_are_refused(tmp_path: Path, rows: Any, features: dict[str, Any], words: str) -> None:
    with pytest.raises(BadConfiguration, match=words):
        Place(tmp_path, rows).prepare({"features": features})


@pytest.mark.parametrize(
    ("features", "words"),
    [
        ({"key": "k"}, "there are no features: set columns, aggregate or both"),
        ({"columns": {"a": {}}}, "write encode: one_hot or ordinal"),
        ({"columns": {"a": {"encode": "ordinal", "normalize": "min_max"}}}, "write encode: one_hot or ordinal"),
        ({"aggregate": {"a": ["mean"]}}, "aggregate needs key"),
        ({"key": "k", "aggregate": {"a": ["median"]}}, "features.aggregate.a.0"),
        ({"key": "k", "columns": {"a.sum": {"encode": "ordinal"}}, "aggregate": {"a": ["sum"]}}, "name as an aggregate"),
    ],
)
def test_invalid_feature_declaration_is_refused(features: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as refused:
        PrepareParameters.model_validate({"features": features})
    problem = refused.value.errors()[0]
    assert words in ".".join(map(str, problem["loc"])) + " " + problem["msg"]


def test_parameters_without_features_omit_their_key() -> None:
    assert "features" not in PrepareParameters().model_dump(mode="json")
    assert FeatureParameters.model_validate(FEATURES).aggregates["spend.sum"] == ("spend", "sum")


def test_moments_are_exact_in_any_order() -> None:
    numbers = [1e16, 1.0, -1e16, 1e-300, 3.5, -0.0, 5e-324]
    given, turned = ExactMoments(), ExactMoments()
    for number in numbers:
        given.add(number)
    for number in reversed(numbers):
        one = ExactMoments()
        one.add(number)
        turned.merge(ExactMoments.from_json(one.to_json()))
    assert given == turned
    assert given.aggregate("sum") == float(sum(map(Fraction, numbers))) == 4.5
    assert ExactMoments().aggregate("mean") is None and ExactMoments().aggregate("count") == 0
