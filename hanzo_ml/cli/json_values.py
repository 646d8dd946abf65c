"""What YAML knows and JSON does not: a date, infinity."""

import json
import math
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

from hanzo_ml.cli.connection import Refused
from recipes.yaml_lines import line_of


def check_json(document: Mapping[str, Any], file: Path | None) -> None:
    """Raises Refused where a value cannot be sent: with its key, its line where there is a file, and what to do."""
    for key, value in document.items():
        try:
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError):
            where, problem = next(unfit(value, (key,)), ((key,), "holds a value that is no JSON: put it in quotes"))
            line = file and line_of(file.read_text(encoding="utf-8"), where)
            place = f"{file}, line {line}: " if line else ""
            raise Refused(f"{place}'{'.'.join(map(str, where))}' {problem}") from None


def unfit(value: Any, where: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """The values below a place that are no JSON, each with its own place and what to do about it."""
    if isinstance(value, date):
        yield where, "is no JSON, such as a date, which YAML takes it for: put it in quotes"
    elif isinstance(value, float) and not math.isfinite(value):
        yield where, f"is {value}: write a number"
    elif isinstance(value, dict):
        for key, below in value.items():
            yield from unfit(below, (*where, key))
    elif isinstance(value, list):
        for place, below in enumerate(value):
            yield from unfit(below, (*where, place))
