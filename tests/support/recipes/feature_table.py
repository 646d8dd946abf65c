"""Customer rows with missing values, and the features of them."""

import random
from typing import Any

FEATURES = {
    "key": "customer",
    "columns": {
        "plan": {"encode": "one_hot"},
        "city": {"encode": "ordinal"},
        "age": {"normalize": "standard"},
        "score": {"normalize": "min_max"},
    },
    "aggregate": {"spend": ["count", "sum", "mean", "std", "min", "max"]},
}


def table(count: int) -> list[dict[str, Any]]:
    """Return customer rows, some with missing values and none with a text."""
    draw = random.Random(4)
    rows: list[dict[str, Any]] = []
    for number in range(count):
        row: dict[str, Any] = {"row": number, "customer": f"c{draw.randrange(count // 3)}", "spend": draw.expovariate(0.01)}
        row |= {
            "plan": draw.choice(("free", "pro", None)),
            "city": draw.choice((1, 2.0, True, "Oslo")),
            "score": draw.random(),
        }
        row["age"] = draw.choice((None, draw.gauss(40, 12), draw.randrange(90)))
        rows.append(row)
    return rows
