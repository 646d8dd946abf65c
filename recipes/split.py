"""The program split: divide a dataset version into train, validation and test, deterministically and without leaks.

Records that ask the same thing in other capitals or punctuation stay together, so that no test question was trained on.
With `group_by`, every group is spread over the splits as evenly as its size allows.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from recipes.layouts import layout_of, layout_of_all, question
from recipes.parameters import SplitParameters
from recipes.record_index import publish_index
from recipes.records import normalize, read_json_lines, write_json_lines
from recipes.runner import main, say
from recipes.schema import BadConfiguration, Job, Result
from recipes.store import Store

SPLITS = ("train", "validation", "test")
OTHER_NAMES = {"training": "train", "val": "validation", "valid": "validation", "dev": "validation", "eval": "validation"}


def split_named(value: object) -> str | None:
    """The split that a record's own column names, in any of the names that the field uses."""
    name = str(value).strip().lower()
    name = OTHER_NAMES.get(name, name)
    return name if name in SPLITS else None


def draw(text: str, seed: int) -> str:
    """The place of a question in the order by which it comes to a split; test has the first, then validation."""
    return hashlib.sha256(f"{seed}\0{text}".encode()).hexdigest()


def split(rows: Sequence[dict[str, Any]], parameters: SplitParameters) -> dict[str, list[dict[str, Any]]]:
    """Rows -> split name -> rows. The same rows and parameters give the same splits, in the same order, everywhere.

    Raises:
        BadConfiguration: a split would be empty, or a record has no layout or names no split.
    """
    if not rows:
        raise BadConfiguration("0 distinct records are too few: the train split would be empty")
    layout = layout_of_all(rows)
    if parameters.column:
        return split_by_column(rows, parameters.column)
    clusters: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        clusters.setdefault(normalize(question(row, layout)), []).append(row)

    def drawn(text: str) -> str:
        return draw(text, parameters.seed)

    ranks: dict[str, int] = {}
    order = []
    for text in sorted(clusters, key=drawn):
        group = str(clusters[text][0].get(parameters.group_by, "")) if parameters.group_by else ""
        ranks[group] = ranks.get(group, 0) + 1
        order.append((ranks[group] if parameters.group_by else 0, drawn(text), text))
    names = [text for _, _, text in sorted(order)]
    test = round(len(names) * parameters.test)
    validation = round(len(names) * parameters.validation)
    chosen = {"test": names[:test], "validation": names[test : test + validation], "train": names[test + validation :]}
    for name, texts in chosen.items():
        if not texts:
            raise BadConfiguration(f"{len(names)} distinct records are too few: the {name} split would be empty")
    return {name: [row for text in sorted(chosen[name], key=drawn) for row in clusters[text]] for name in SPLITS}


def split_by_column(rows: Sequence[dict[str, Any]], column: str) -> dict[str, list[dict[str, Any]]]:
    """The splits that the records name themselves, in their own order."""
    splits: dict[str, list[dict[str, Any]]] = {name: [] for name in SPLITS}
    for line, row in enumerate(rows, start=1):
        if (name := split_named(row.get(column))) is None:
            raise BadConfiguration(f"line {line}: '{column}' must be one of {', '.join(SPLITS)}")
        splits[name].append(row)
    for name, chosen in splits.items():
        if not chosen:
            raise BadConfiguration(f"no record has '{name}' in '{column}': a dataset needs all of {', '.join(SPLITS)}")
    return splits


def divide(job: Job, store: Store, work: Path) -> Result:
    """Split a version. Input: `dataset`. Outputs: `train`, `validation`, `test`."""
    parameters = SplitParameters.model_validate(job.parameters)
    source = job.inputs["dataset"]
    folder = store.fetch(source, Path(job.cache_dir))
    rows = [row for file in sorted(folder.glob("*.jsonl")) for row in read_json_lines(file)]
    splits = split(rows, parameters)
    artifacts = {}
    for name, chosen in splits.items():
        target = work / name
        target.mkdir(parents=True, exist_ok=True)
        write_json_lines(target / f"{name}.jsonl", chosen)
        facts: dict[str, JsonValue] = {
            "split": name,
            "num_records": len(chosen),
            "parameters": parameters.model_dump(mode="json"),
        }
        artifacts[name] = store.publish(target, job.outputs[name], "split", inputs={"dataset": source.digest}, facts=facts)
        with target.joinpath(f"{name}.jsonl").open("rb") as lines:
            publish_index(store, artifacts[name], lines, work / f"{name}.index")
        say(f"{name}: {len(chosen)} records")
    return Result(
        work_digest=job.work_digest,
        artifacts=artifacts,
        metrics={name: float(len(chosen)) for name, chosen in splits.items()},
        facts={"leaked": leaked(splits)},
    )


def leaked(splits: dict[str, list[dict[str, Any]]]) -> int:
    """How many held-out questions also stand in the training split."""

    def asked(row: dict[str, Any]) -> str:
        return normalize(question(row, layout_of(row)))

    trained = {asked(row) for row in splits["train"]}
    return sum(asked(row) in trained for name in ("validation", "test") for row in splits[name])


if __name__ == "__main__":
    main(divide)
