"""Distributions as small pictures in SVG, for the Dagster UI and for reports. All text in them is escaped."""

import base64
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from recipes.contracts.validation_results import Numbers

WIDTH, HEIGHT, MARGIN = 560, 200, 34
BINS = 30
ROW, LABEL = 22, 170
SHOWN = 28
COLOR, OTHER, INK = "#4f43dd", "#f2a541", "#5b6170"
STYLE = 'xmlns="http://www.w3.org/2000/svg" font-family="system-ui, sans-serif" font-size="11"'


def histogram(title: str, numbers: Numbers, before: Numbers | None = None) -> str:
    """The sample as bars; `before` is another one's, drawn as a line over them. Both as shares."""
    if len(numbers.sample) < 2:
        return ""
    samples = [numbers.sample, *([before.sample] if before is not None and before.sample else [])]
    together = np.concatenate([np.asarray(sample) for sample in samples])
    edges = edges_of(together)
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
    line = f'<polyline points="{points}" fill="none" stroke="{OTHER}" stroke-width="2"/>' if points else ""
    base = HEIGHT - MARGIN
    return (
        f'<svg {STYLE} viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">'
        f'<text x="{MARGIN}" y="18" font-size="13" fill="{INK}">{escape(title)}</text>{bars}{line}'
        f'<path d="M{MARGIN},{base + 0.5} H{WIDTH - MARGIN}" stroke="#c9ccd6"/>'
        f'<text x="{MARGIN}" y="{base + 15}" fill="{INK}">{together.min():,.4g}</text>'
        f'<text x="{WIDTH - MARGIN}" y="{base + 15}" text-anchor="end" fill="{INK}">{together.max():,.4g}</text>'
        f'<text x="{WIDTH - MARGIN}" y="18" text-anchor="end" fill="{INK}">'
        f"mean {numbers.mean or 0:,.4g}, highest bar {shares[0].max():.0%}</text></svg>"
    )


def edges_of(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Bins of one width over all but the outermost values; whole numbers get bins of as many of them each."""
    low, high = np.quantile(values, [0.001, 0.999])
    if np.all(values == np.round(values)):
        width = max(1.0, np.ceil((high - low + 1) / BINS))
        low, high = np.floor(low) - 0.5, np.floor(low) - 0.5 + width * BINS
    return np.linspace(low, high if high > low else low + 1, BINS + 1)


def bars(title: str, counts: Mapping[str, int], most: int = 12, total: int | None = None) -> str:
    """The largest counts as horizontal bars with their shares of `total`, which is all of them where it is not given."""
    total = sum(counts.values()) if total is None else total
    if not total:
        return ""
    chosen: Sequence[tuple[str, int]] = sorted(counts.items(), key=lambda item: -item[1])[:most]
    top, height = chosen[0][1], 34 + ROW * len(chosen)
    wide = WIDTH - LABEL - 90
    rows = "".join(
        bar(place, name, wide * count / top, f"{count:,} ({count / total:.1%})")
        for place, (name, count) in enumerate(chosen)
    )
    return (
        f'<svg {STYLE} viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">'
        f'<text x="{MARGIN}" y="18" font-size="13" fill="{INK}">{escape(title)}</text>{rows}</svg>'
    )


def bar(place: int, name: str, length: float, figure: str) -> str:
    """Row number `place`: its name, a bar of `length` pixels, and its figure behind it."""
    base = 44 + ROW * place
    return (
        f'<text x="{LABEL - 8}" y="{base}" text-anchor="end" fill="{INK}">{escape(shortened(name))}</text>'
        f'<rect x="{LABEL}" y="{base - 12}" width="{max(1.0, length):.1f}" height="{ROW - 6}" fill="{COLOR}"/>'
        f'<text x="{LABEL + 6 + length:.1f}" y="{base}" fill="{INK}">{figure}</text>'
    )


def shortened(text: str) -> str:
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def as_markdown(title: str, picture: str) -> str:
    """A picture as a Markdown image that needs no other file."""
    return f"![{title}](data:image/svg+xml;base64,{base64.b64encode(picture.encode()).decode()})" if picture else ""
