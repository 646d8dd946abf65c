"""A version as one HTML page that needs nothing else: no script, no other file, all text of the data escaped."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from recipes.contracts.validation_results import Statistics
from recipes.counted import counted
from resources.datasets.validations import Validation
from resources.metadata.datasets import DatasetVersion
from resources.validation.plots import bars, histogram

SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox"
MANY_WORDS = 20


def report(version: DatasetVersion, validation: Validation, statistics: Statistics, before: Statistics | None) -> str:
    """The page. `before` are the statistics that the version was compared with, drawn over its own."""
    environment = Environment(
        loader=PackageLoader("resources.datasets", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"day": day, "percent": percent, "figure": figure, "counted": counted}
    return environment.get_template("report.html.jinja").render(
        version=version,
        validation=validation,
        violations=validation.facts.violations,
        drift=validation.facts.drift,
        statistics=statistics,
        figures=list(figures(version, statistics)),
        plots=[Markup(picture) for picture in pictures(statistics, before) if picture],  # escaped where they are drawn
        compared=before is not None,
        lineage=list(lineage(version)),
    )


def figures(version: DatasetVersion, statistics: Statistics) -> Iterator[tuple[str, str]]:
    """What is told in large letters."""
    yield "records", f"{statistics.records:,}"
    yield "bytes", f"{version.size_bytes:,}"
    yield "mean characters", figure(statistics.characters.mean)
    yield "different words", f"{statistics.vocabulary.distinct:,}"
    yield "duplicates", f"{statistics.duplicates:,}"
    if statistics.near_duplicates is not None:
        yield "near duplicates", f"{statistics.near_duplicates:,}"
    yield "personal data", f"{sum(statistics.personal_data.values()):,}"
    yield "newest record", day(statistics.newest if statistics.newest is not None else version.created_at)[:10]


def pictures(statistics: Statistics, before: Statistics | None) -> Iterator[str]:
    yield histogram("Characters of a record", statistics.characters, before.characters if before else None)
    yield histogram("Words of a record", statistics.words, before.words if before else None)
    for name, column in statistics.columns.items():
        earlier = before.columns.get(name) if before else None
        if column.categories is not None:
            yield bars(name, column.categories)
        elif column.numbers is not None:
            yield histogram(name, column.numbers, earlier.numbers if earlier else None)
        elif column.lengths is not None:
            yield histogram(f"Length of {name}", column.lengths, earlier.lengths if earlier else None)
    yield bars("Most frequent words", statistics.vocabulary.top, MANY_WORDS, statistics.vocabulary.words)
    yield bars("Languages", statistics.languages)
    yield bars("Layouts", statistics.layouts)
    yield bars("Personal data and secrets", statistics.personal_data)


def lineage(version: DatasetVersion) -> Iterator[tuple[str, str]]:
    """What the version was made from, and what was made of it."""
    yield "parents", ", ".join(version.lineage.get("parent_datasets", ())) or "none: its files were brought here"
    transform = version.lineage.get("transform", "")
    yield "transform", transform if isinstance(transform, str) else json.dumps(transform, ensure_ascii=False)
    yield "records", f"{version.artifact.uri} ({version.artifact.digest})"
    for name, split in version.splits.items():
        yield f"{name} split", f"{counted(split['num_records'], 'record')}, {split['artifact']['digest']}"


def day(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")


def percent(share: float) -> str:
    return f"{share:.1%}"


def figure(number: float | None) -> str:
    return "" if number is None else f"{number:,.4g}" if abs(number) < 10_000 else f"{number:,.0f}"
