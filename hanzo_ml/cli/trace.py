"""`hanzo-ml dataset trace`: which models saw a record, as a tree."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.tree import Tree

from hanzo_ml.cli.connection import Refused, call
from hanzo_ml.cli.output import AsJson, show
from hanzo_ml.cli.terminal import in_markup
from recipes.counted import counted

MOST = 100
"""Records of one file: each is a question of its own."""


def trace(
    record: Annotated[Path | None, typer.Option(help="A file with a record, or with one a line.")] = None,
    match: Annotated[str | None, typer.Option(help="Trace all records in which this text stands.")] = None,
    limit: Annotated[int, typer.Option(help="How many of the matching records are traced; all are counted.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Which dataset versions, splits, runs, models and deployments a record reached."""
    if (record is None) == (match is None):
        raise Refused("say what to trace: --record FILE or --match TEXT")
    if match is not None:
        found = call("POST", "/v1/datasets/trace", json={"match": match, "limit": limit})
        traces = found["traces"]
    else:
        assert record is not None
        traces = [call("POST", "/v1/datasets/trace", json={"record": row}) for row in records_of(record)]
        found = traces[0] if len(traces) == 1 else {"traces": traces}
    if as_json:
        show(found)
    else:
        print_traces(traces, found.get("records") if match is not None else None)


def records_of(path: Path) -> list[dict[str, Any]]:
    """The records of a file: one JSON object in as many lines as it likes, or one a line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise Refused(f"{path} cannot be read ({error.strerror}): check --record") from None
    except UnicodeDecodeError:
        raise Refused(f"{path} is not UTF-8: --record takes JSON") from None
    try:
        rows = [json.loads(text)]
    except json.JSONDecodeError:
        rows = [row_of(path, number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise Refused(f"{path} holds no record: write a JSON object, or one a line")
    if len(rows) > MOST:
        raise Refused(f"{path} holds {len(rows)} records: trace at most {MOST} at a time")
    return rows


def row_of(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise Refused(f"{path}, line {number}: not JSON ({error.msg}, column {error.colno})") from None


def print_traces(traces: list[dict[str, Any]], matching: int | None) -> None:
    # As with a proof: Rich would cut the lines of a tree at the console's width.
    console = Console(highlight=False, soft_wrap=True, width=10_000)
    for each in traces:
        root = Tree(f"record {each['record']} [dim]{in_markup(' '.join(each['preview'].split()))}[/dim]")
        for node in each["reached"]:
            draw(node, root)
        console.print(root)
        if not each["found"]:
            console.print("no version holds this record")
            continue
        counts = ", ".join(counted(count, kind) for kind, count in each["totals"].items())
        served = (
            "[red]served now[/red]: " + in_markup(", ".join(each["live"]))
            if each["live"]
            else "nothing that learned from it is served"
        )
        console.print(f"{counts}; {served}")
    if matching == 0:
        console.print("no version holds a record with this text")
    elif matching is not None:
        console.print(f"{counted(matching, 'matching record')}, {len(traces)} traced")


def draw(node: dict[str, Any], tree: Tree) -> None:
    """A node and what it reached, as branches."""
    name = in_markup(f"{node['kind']} {node['name']}" if node["kind"] != "model version" else node["name"])
    told = in_markup("; ".join(part for part in described(node["kind"], node["facts"]) if part))
    if node["seen_above"]:
        used = "".join(f" {use}," for use in node["facts"].get("used", ()))
        tree.add(f"[dim]↑ {name},{in_markup(used)} shown above[/dim]")
        return
    branch = tree.add(f"{name} [dim]{told}[/dim]")
    for following in node["reached"]:
        draw(following, branch)


def described(kind: str, facts: dict[str, Any]) -> list[str]:
    """What is said of a node beside its name."""
    match kind:
        case "dataset version" | "split":
            more = ", ..." if facts["records"] > len(facts["numbers"]) else ""
            numbers = ", ".join(f"{number:,}" for number in facts["numbers"])
            one = facts["records"] == 1
            counted = f"record {numbers}" if one else f"{facts['records']:,} records: {numbers}{more}"
            return [counted, ", ".join(facts["how"])]
        case "run":
            return [", ".join(facts["used"]), facts.get("status", ""), day(facts.get("ended"))]
        case "model version":
            learned = "learned from it" if facts["learned"] else "only measured with it"
            return [learned, f"stage {facts['stage']}", facts["status"], ", ".join(facts["formats"])]
        case "deployment":
            until = f" until {day(facts['until'])}" if facts["until"] else ""
            return [f"{facts['status']} since {day(facts['since'])}{until}"]
    return []


def day(milliseconds: int | None) -> str:
    """A point in time in UTC, to the minute."""
    return f"{datetime.fromtimestamp(milliseconds / 1000, UTC):%Y-%m-%d %H:%M} UTC" if milliseconds else ""
