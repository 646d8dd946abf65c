"""The loss curve of a run as a small picture in Markdown, for the Dagster UI."""

import base64
import math
from collections.abc import Mapping

WIDTH, HEIGHT, MARGIN = 340, 170, 36
"""The cell of an asset's overview is that wide in a window of 1400; Dagster cuts a picture that is wider."""


def loss_plot(losses: Mapping[int, float]) -> str:
    """Step -> loss as a Markdown image; values that are not finite are left out."""
    points = sorted((step, loss) for step, loss in losses.items() if math.isfinite(loss))
    if len(points) < 2:
        return "no curve: fewer than two finite losses"
    last, top = points[-1][0], max(loss for _, loss in points)
    first = points[0][0]

    def place(step: int, loss: float) -> str:
        x = MARGIN + (WIDTH - 2 * MARGIN) * (step - first) / max(last - first, 1)
        y = HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * loss / (top or 1.0)
        return f"{x:.1f},{y:.1f}"

    line = " ".join(place(step, loss) for step, loss in points)
    picture = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
        f'<path d="M{MARGIN},{MARGIN} V{HEIGHT - MARGIN} H{WIDTH - MARGIN}" stroke="#888" fill="none"/>'
        f'<polyline points="{line}" stroke="#4f43dd" stroke-width="2" fill="none"/>'
        f'<text x="4" y="{MARGIN + 4}">{top:.2f}</text><text x="14" y="{HEIGHT - MARGIN + 4}">0</text>'
        f'<text x="{MARGIN}" y="{HEIGHT - 12}">step {first}</text>'
        f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 12}" text-anchor="end">step {last}, loss {points[-1][1]:.3f}</text></svg>'
    )
    return f"![loss by step](data:image/svg+xml;base64,{base64.b64encode(picture.encode()).decode()})"
