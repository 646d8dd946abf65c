"""Records of several layouts, with duplicates and invalid lines."""

from typing import Any

from tests.recipes.preparation.preparation_workspace import questions

BAD = [b'{"foo":1}', b"not json", b'{"text":""}']


def mixed(count: int) -> list[dict[str, Any] | bytes]:
    """Return records of three layouts with e-mails, duplicates, a rare class and invalid lines."""
    rows: list[dict[str, Any] | bytes] = []
    for number, row in enumerate(questions(count)):
        row["class"] = "rare" if number % 10 == 0 else "often"
        if number % 7 == 0:
            row["answer"] += f" Write to keeper{number}@example.com."
        if number % 11 == 0:
            row = {"text": row["answer"] + " " + row["instruction"], "class": row["class"]}
        elif number % 13 == 0:
            turns = [{"role": "user", "content": row["instruction"]}, {"role": "assistant", "content": row["answer"]}]
            row = {"messages": turns, "class": row["class"]}
        rows.append(row)
        if number % 20 == 0:
            rows.append(dict(row, id=number))
        if number % 100 == 0:
            rows.append(BAD[number // 100 % len(BAD)])
    return rows


SMALL = {"range_bytes": 20_000, "part_bytes": 30_000, "fan": 2, "held_bytes": 2_000}

"""Limits small enough for many ranges, parts and rounds, as for an input of terabytes."""

EVERYTHING: dict[str, Any] = {
    "filter": {"language": "en", "min_length": 8, "near_dedup": {"threshold": 0.9}},
    "augment": {"oversample_minority": True},
}
