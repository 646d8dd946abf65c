"""Render a version's validation as one self-contained HTML page with SVG plots."""

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray

from recipes.contracts.quantities import pluralize
from recipes.contracts.validation_results import Numbers, Statistics
from resources.datasets.validations import Validation
from resources.metadata.datasets import DatasetVersion

# Distributions as small SVG plots, for the Dagster UI and for reports. All text in them is escaped.

WIDTH, HEIGHT, MARGIN = 560, 200, 34
BINS = 30
ROW_HEIGHT, LABEL_WIDTH = 22, 170
MAX_LABEL_CHARACTERS = 28
COLOR, OTHER_COLOR, TEXT_COLOR = "#4f43dd", "#f2a541", "#5b6170"
STYLE = 'xmlns="http://www.w3.org/2000/svg" font-family="system-ui, sans-serif" font-size="11"'


def histogram(title: str, numbers: Numbers, before: Numbers | None = None) -> str:
    """Plot the sample as bars, and `before` as a line over them.

    Both are shares of their sample.
    """
    if len(numbers.sample) < 2:
        return ""
    samples = [numbers.sample, *([before.sample] if before is not None and before.sample else [])]
    together = np.concatenate([np.asarray(sample) for sample in samples])
    edges = bin_edges(together)
    shares = [np.histogram(np.clip(sample, edges[0], edges[-1]), edges)[0] / len(sample) for sample in samples]
    top = max(float(share.max()) for share in shares)
    wide, tall = (WIDTH - 2 * MARGIN) / BINS, HEIGHT - 2 * MARGIN
    bars = "".join(
        f'<rect x="{MARGIN + wide * place:.1f}" y="{MARGIN + tall * (1 - share / top):.1f}" '
        f'width="{wide - 1:.1f}" height="{tall * share / top:.1f}" fill="{COLOR}"/>'
        for place, share in enumerate(shares[0])
        if share
    )
    points = " ".join(
        f"{MARGIN + wide * (place + 0.5):.1f},{MARGIN + tall * (1 - share / top):.1f}"
        for share_list in shares[1:]
        for place, share in enumerate(share_list)
    )
    line = f'<polyline points="{points}" fill="none" stroke="{OTHER_COLOR}" stroke-width="2"/>' if points else ""
    base = HEIGHT - MARGIN
    return (
        f'<svg {STYLE} viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">'
        f'<text x="{MARGIN}" y="18" font-size="13" fill="{TEXT_COLOR}">{escape(title)}</text>{bars}{line}'
        f'<path d="M{MARGIN},{base + 0.5} H{WIDTH - MARGIN}" stroke="#c9ccd6"/>'
        f'<text x="{MARGIN}" y="{base + 15}" fill="{TEXT_COLOR}">{together.min():,.4g}</text>'
        f'<text x="{WIDTH - MARGIN}" y="{base + 15}" text-anchor="end" fill="{TEXT_COLOR}">{together.max():,.4g}</text>'
        f'<text x="{WIDTH - MARGIN}" y="18" text-anchor="end" fill="{TEXT_COLOR}">'
        f"mean {numbers.mean or 0:,.4g}, highest bar {shares[0].max():.0%}</text></svg>"
    )


def bin_edges(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return bins of equal width over all but the outermost values.

    For integers, each bin has equally many of them.
    """
    low, high = np.quantile(values, [0.001, 0.999])
    if np.all(values == np.round(values)):
        width = max(1.0, np.ceil((high - low + 1) / BINS))
        low, high = np.floor(low) - 0.5, np.floor(low) - 0.5 + width * BINS
    return np.linspace(low, high if high > low else low + 1, BINS + 1)


def bar_chart(title: str, counts: Mapping[str, int], max_bars: int = 12, total: int | None = None) -> str:
    """Plot the largest counts as horizontal bars with their shares of `total`.

    The default for `total` is the sum of all counts.
    """
    total = sum(counts.values()) if total is None else total
    if not total:
        return ""
    chosen: Sequence[tuple[str, int]] = sorted(counts.items(), key=lambda item: -item[1])[:max_bars]
    top, height = chosen[0][1], 34 + ROW_HEIGHT * len(chosen)
    wide = WIDTH - LABEL_WIDTH - 90
    rows = "".join(
        bar_row(place, name, wide * count / top, f"{count:,} ({count / total:.1%})")
        for place, (name, count) in enumerate(chosen)
    )
    return (
        f'<svg {STYLE} viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">'
        f'<text x="{MARGIN}" y="18" font-size="13" fill="{TEXT_COLOR}">{escape(title)}</text>{rows}</svg>'
    )


def bar_row(place: int, name: str, length: float, figure: str) -> str:
    """Draw row number `place`: its name, a bar of `length` pixels, and its figure."""
    base = 44 + ROW_HEIGHT * place
    return (
        f'<text x="{LABEL_WIDTH - 8}" y="{base}" text-anchor="end" fill="{TEXT_COLOR}">{escape(shorten(name))}</text>'
        f'<rect x="{LABEL_WIDTH}" y="{base - 12}" width="{max(1.0, length):.1f}" height="{ROW_HEIGHT - 6}" fill="{COLOR}"/>'
        f'<text x="{LABEL_WIDTH + 6 + length:.1f}" y="{base}" fill="{TEXT_COLOR}">{figure}</text>'
    )


def shorten(text: str) -> str:
    return text if len(text) <= MAX_LABEL_CHARACTERS else text[: MAX_LABEL_CHARACTERS - 1] + "…"


def markdown_image(title: str, picture: str) -> str:
    """Return a picture as a Markdown image that needs no other file."""
    return f"![{title}](data:image/svg+xml;base64,{base64.b64encode(picture.encode()).decode()})" if picture else ""


# A version as one self-contained HTML page: no script, no other file, all text of the data escaped.

SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox"
MAX_WORDS = 20


def render_report(version: DatasetVersion, validation: Validation, statistics: Statistics, before: Statistics | None) -> str:
    """Render the page.

    `before` has the statistics of the version that it was compared with, drawn over its own.
    """
    environment = Environment(
        loader=PackageLoader("resources.datasets", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"day": format_day, "percent": format_percent, "figure": format_number, "counted": pluralize}
    return environment.get_template("report.html.jinja").render(
        version=version,
        validation=validation,
        violations=validation.facts.violations,
        drift=validation.facts.drift,
        statistics=statistics,
        figures=list(key_figures(version, statistics)),
        plots=[Markup(picture) for picture in draw_plots(statistics, before) if picture],  # escaped by the plot functions
        compared=before is not None,
        lineage=list(lineage_rows(version)),
    )


def key_figures(version: DatasetVersion, statistics: Statistics) -> Iterator[tuple[str, str]]:
    """Yield the figures in large type."""
    yield "records", f"{statistics.records:,}"
    yield "bytes", f"{version.size_bytes:,}"
    yield "mean characters", format_number(statistics.characters.mean)
    yield "different words", f"{statistics.vocabulary.distinct:,}"
    yield "duplicates", f"{statistics.duplicates:,}"
    if statistics.near_duplicates is not None:
        yield "near duplicates", f"{statistics.near_duplicates:,}"
    yield "personal data", f"{sum(statistics.personal_data.values()):,}"
    yield "newest record", format_day(statistics.newest if statistics.newest is not None else version.created_at)[:10]


def draw_plots(statistics: Statistics, before: Statistics | None) -> Iterator[str]:
    yield histogram("Characters of a record", statistics.characters, before.characters if before else None)
    yield histogram("Words of a record", statistics.words, before.words if before else None)
    for name, column in statistics.columns.items():
        earlier = before.columns.get(name) if before else None
        if column.categories is not None:
            yield bar_chart(name, column.categories)
        elif column.numbers is not None:
            yield histogram(name, column.numbers, earlier.numbers if earlier else None)
        elif column.lengths is not None:
            yield histogram(f"Length of {name}", column.lengths, earlier.lengths if earlier else None)
    yield bar_chart("Most frequent words", statistics.vocabulary.top, MAX_WORDS, statistics.vocabulary.words)
    yield bar_chart("Languages", statistics.languages)
    yield bar_chart("Layouts", statistics.layouts)
    yield bar_chart("Personal data and secrets", statistics.personal_data)


def lineage_rows(version: DatasetVersion) -> Iterator[tuple[str, str]]:
    """Yield what the version was made from, and what was made from it."""
    yield "parents", ", ".join(version.lineage.get("parent_datasets", ())) or "none: its files were imported"
    transform = version.lineage.get("transform", "")
    yield "transform", transform if isinstance(transform, str) else json.dumps(transform, ensure_ascii=False)
    yield "records", f"{version.artifact.uri} ({version.artifact.digest})"
    for name, split in version.splits.items():
        yield f"{name} split", f"{pluralize(split['num_records'], 'record')}, {split['artifact']['digest']}"


def format_day(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")


def format_percent(share: float) -> str:
    return f"{share:.1%}"


def format_number(number: float | None) -> str:
    return "" if number is None else f"{number:,.4g}" if abs(number) < 10_000 else f"{number:,.0f}"
