"""The program split: divide a dataset version into train, validation and test, deterministically and without leaks.

With `group_by`, every group is spread over the splits as evenly as its size allows. A dataset may be larger than memory: it
is read twice, one record at a time, and the second time in the order of the splits.
"""

import json
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue

from recipes.assignment import SPLITS, assign, draw, leaks, named, split_named
from recipes.layouts import laid_out, question
from recipes.parameters import SplitParameters
from recipes.record_index import publish_index
from recipes.records import normalize, write_json_lines
from recipes.runner import main, say
from recipes.schema import BadConfiguration, Job, Result
from recipes.store import Store


@dataclass(frozen=True)
class Divided:
    """Of each split the numbers of its records, counted from 0, in their order; and the held-out ones that leaked."""

    numbers: Mapping[str, NDArray[np.int64]]
    leaked: int


def split(rows: Iterable[Mapping[str, Any]], parameters: SplitParameters) -> Divided:
    """The same rows and parameters give the same splits, in the same order, everywhere. Rows are seen once, and not kept.

    Raises:
        BadConfiguration: a split would be empty, or a record has no layout or names no split.
    """
    draws, splits, groups = array("Q"), array("b"), array("q")
    codes: dict[str, int] = {}
    for line, (row, layout) in enumerate(laid_out(rows), start=1):
        draws.append(draw(normalize(question(row, layout)), parameters.seed))
        if parameters.column:
            if (name := split_named(row.get(parameters.column))) is None:
                raise BadConfiguration(f"line {line}: '{parameters.column}' must be one of {', '.join(SPLITS)}")
            splits.append(SPLITS.index(name))
        elif parameters.group_by:
            groups.append(codes.setdefault(str(row.get(parameters.group_by, "")), len(codes)))
    drawn = np.frombuffer(draws, np.uint64)
    if parameters.column:
        # In their own order: whoever names the splits may have put them in one.
        chosen, order = named(np.frombuffer(splits, np.int8), parameters.column), np.arange(len(drawn))
    else:
        group = np.frombuffer(groups, np.int64) if parameters.group_by else np.zeros(len(drawn), np.int64)
        chosen, order = assign(drawn, group, parameters), np.argsort(drawn, kind="stable")
    numbers = {name: order[chosen[order] == place] for place, name in enumerate(SPLITS)}
    return Divided(numbers, leaks(drawn, chosen))


class Lines:
    """The records of files, first one after the other, then each by its number: where it begins is remembered."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._paths = files
        self._files = ExitStack()
        self._open: list[int] = []
        self._starts, self._lengths, self._of = array("q"), array("q"), array("i")

    def __enter__(self) -> Self:
        for path in self._paths:
            self._open.append(self._files.enter_context(path.open("rb")).fileno())
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()

    def rows(self) -> Iterator[dict[str, Any]]:
        """All rows, one after the other. Only a newline ends one; lines that hold nothing are none."""
        for place, path in enumerate(self._paths):
            start = 0
            with path.open("rb") as lines:
                for line in lines:
                    if line.strip():
                        self._starts.append(start)
                        self._lengths.append(len(line))
                        self._of.append(place)
                        yield json.loads(line)
                    start += len(line)

    def read(self, number: int) -> bytes:
        """A line that `rows` has given."""
        return os.pread(self._open[self._of[number]], self._lengths[number], self._starts[number])


def divide(job: Job, store: Store, work: Path) -> Result:
    """Split a version. Input: `dataset`. Outputs: `train`, `validation`, `test`."""
    parameters = SplitParameters.model_validate(job.parameters)
    source = job.inputs["dataset"]
    inputs = {"dataset": source.digest}
    artifacts = {}
    with Lines(sorted(store.fetch(source, Path(job.cache_dir)).glob("*.jsonl"))) as lines:
        divided = split(lines.rows(), parameters)
        for name, numbers in divided.numbers.items():
            target = work / name
            target.mkdir(parents=True, exist_ok=True)
            file = target / f"{name}.jsonl"
            write_json_lines(file, (json.loads(lines.read(number)) for number in numbers))
            facts: dict[str, JsonValue] = {
                "split": name,
                "num_records": len(numbers),
                "parameters": parameters.model_dump(mode="json"),
            }
            artifacts[name] = store.publish(target, job.outputs[name], "split", inputs=inputs, facts=facts)
            with file.open("rb") as written:
                publish_index(store, artifacts[name], written, work / f"{name}.index")
            say(f"{name}: {len(numbers)} records")
    return Result(
        work_digest=job.work_digest,
        artifacts=artifacts,
        metrics={name: float(len(numbers)) for name, numbers in divided.numbers.items()},
        facts={"leaked": divided.leaked},
    )


if __name__ == "__main__":
    main(divide)
