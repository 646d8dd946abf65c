"""The program prepare: split a dataset version into train, validation and test, deterministically and without leaks.

Records that ask the same thing in other capitals or punctuation stay together, so that no test question was trained on.
With `group_by`, every group is spread over the splits as evenly as its size allows.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from recipes.parameters import PrepareParameters
from recipes.records import normalize, read_json_lines, write_json_lines
from recipes.runner import main, say
from recipes.schema import BadConfiguration, Job, Result
from recipes.store import Store

SPLITS = ("train", "validation", "test")


def split(rows: Sequence[dict[str, Any]], parameters: PrepareParameters) -> dict[str, list[dict[str, Any]]]:
    """Rows -> split name -> rows. The same rows and parameters give the same splits, in the same order, everywhere.

    Raises:
        BadConfiguration: a split would be empty.
    """
    clusters: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        clusters.setdefault(normalize(row["instruction"]), []).append(row)

    def draw(text: str) -> str:
        return hashlib.sha256(f"{parameters.seed}\0{text}".encode()).hexdigest()

    ranks: dict[str, int] = {}
    order = []
    for text in sorted(clusters, key=draw):
        group = str(clusters[text][0].get(parameters.group_by, "")) if parameters.group_by else ""
        ranks[group] = ranks.get(group, 0) + 1
        order.append((ranks[group] if parameters.group_by else 0, draw(text), text))
    names = [text for _, _, text in sorted(order)]
    test = round(len(names) * parameters.test)
    validation = round(len(names) * parameters.validation)
    chosen = {"test": names[:test], "validation": names[test : test + validation], "train": names[test + validation :]}
    for name, texts in chosen.items():
        if not texts:
            raise BadConfiguration(f"{len(names)} distinct records are too few: the {name} split would be empty")
    return {name: [row for text in sorted(chosen[name], key=draw) for row in clusters[text]] for name in SPLITS}


def prepare(job: Job, store: Store, work: Path) -> Result:
    """Split. Input: `dataset`. Outputs: `train`, `validation`, `test`."""
    parameters = PrepareParameters.model_validate(job.parameters)
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
        say(f"{name}: {len(chosen)} records")
    return Result(
        work_digest=job.work_digest,
        artifacts=artifacts,
        metrics={name: float(len(chosen)) for name, chosen in splits.items()},
        facts={"leaked": leaked(splits)},
    )


def leaked(splits: dict[str, list[dict[str, Any]]]) -> int:
    """How many held-out questions also stand in the training split."""
    trained = {normalize(row["instruction"]) for row in splits["train"]}
    return sum(normalize(row["instruction"]) in trained for name in ("validation", "test") for row in splits[name])


if __name__ == "__main__":
    main(prepare)
