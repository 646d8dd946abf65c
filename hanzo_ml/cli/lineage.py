"""`hanzo-ml dataset trace` and `model data`: which models learned from which data."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.tree import Tree

from hanzo_ml.cli.connection import Refused, call
from hanzo_ml.cli.output import JsonOption, print_json, sanitize_markup
from recipes.contracts.quantities import pluralize

# `hanzo-ml dataset trace`

MAX_RECORDS = 100
"""Maximum number of records in a file; each is one request."""


def trace(
    record: Annotated[Path | None, typer.Option(help="JSON file with one record, or one record per line.")] = None,
    match: Annotated[str | None, typer.Option(help="Trace all records that contain this text.")] = None,
    limit: Annotated[int, typer.Option(help="Maximum number of matching records to trace; all are counted.")] = 10,
    as_json: JsonOption = False,
) -> None:
    """Trace a record to the dataset versions, splits, runs, models and deployments that it reached."""
    if (record is None) == (match is None):
        raise Refused("nothing to trace: use --record FILE or --match TEXT")
    if match is not None:
        found = call("POST", "/v1/datasets/trace", json={"match": match, "limit": limit})
        traces = found["traces"]
    else:
        assert record is not None
        traces = [call("POST", "/v1/datasets/trace", json={"record": row}) for row in read_record_file(record)]
        found = traces[0] if len(traces) == 1 else {"traces": traces}
    if as_json:
        print_json(found)
    else:
        print_traces(traces, found.get("records") if match is not None else None)


def read_record_file(path: Path) -> list[dict[str, Any]]:
    """Read a file of one JSON object, or one per line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise Refused(f"{path} cannot be read ({error.strerror}): check --record") from None
    except UnicodeDecodeError:
        raise Refused(f"{path} is not UTF-8: --record needs JSON in UTF-8") from None
    try:
        rows = [json.loads(text)]
    except json.JSONDecodeError:
        rows = [
            parse_record_line(path, number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()
        ]
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise Refused(f"{path} holds no record: write one JSON object, or one per line")
    if len(rows) > MAX_RECORDS:
        raise Refused(f"{path} holds {len(rows)} records: trace at most {MAX_RECORDS} at a time")
    return rows


def parse_record_line(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise Refused(f"{path}, line {number}: not JSON ({error.msg}, column {error.colno})") from None


def print_traces(traces: list[dict[str, Any]], matching: int | None) -> None:
    # Rich would cut the lines of a tree at the console's width.
    console = Console(highlight=False, soft_wrap=True, width=10_000)
    for each in traces:
        root = Tree(f"record {each['record']} [dim]{sanitize_markup(' '.join(each['preview'].split()))}[/dim]")
        for node in each["reached"]:
            draw_node(node, root)
        console.print(root)
        if not each["found"]:
            console.print("no version holds this record")
            continue
        counts = ", ".join(pluralize(count, kind) for kind, count in each["totals"].items())
        served = (
            "[red]served now[/red]: " + sanitize_markup(", ".join(each["live"]))
            if each["live"]
            else "nothing that learned from it is served"
        )
        console.print(f"{counts}; {served}")
    if matching == 0:
        console.print("no version holds a record with this text")
    elif matching is not None:
        console.print(f"{pluralize(matching, 'matching record')}, {len(traces)} traced")


def draw_node(node: dict[str, Any], tree: Tree) -> None:
    """Draw a node and what it reached as branches."""
    name = sanitize_markup(f"{node['kind']} {node['name']}" if node["kind"] != "model version" else node["name"])
    details = sanitize_markup("; ".join(part for part in describe_node(node["kind"], node["facts"]) if part))
    if node["seen_above"]:
        used = "".join(f" {use}," for use in node["facts"].get("used", ()))
        tree.add(f"[dim]↑ {name},{sanitize_markup(used)} shown above[/dim]")
        return
    branch = tree.add(f"{name} [dim]{details}[/dim]")
    for following in node["reached"]:
        draw_node(following, branch)


def describe_node(kind: str, facts: dict[str, Any]) -> list[str]:
    """Details of a node, shown after its name."""
    match kind:
        case "dataset version" | "split":
            more = ", ..." if facts["records"] > len(facts["numbers"]) else ""
            numbers = ", ".join(f"{number:,}" for number in facts["numbers"])
            one = facts["records"] == 1
            counted = f"record {numbers}" if one else f"{facts['records']:,} records: {numbers}{more}"
            return [counted, ", ".join(facts["how"])]
        case "run":
            return [", ".join(facts["used"]), facts.get("status", ""), format_minute(facts.get("ended"))]
        case "model version":
            learned = "learned from it" if facts["learned"] else "only measured with it"
            return [learned, f"stage {facts['stage']}", facts["status"], ", ".join(facts["formats"])]
        case "deployment":
            until = f" until {format_minute(facts['until'])}" if facts["until"] else ""
            return [f"{facts['status']} since {format_minute(facts['since'])}{until}"]
    return []


def format_minute(milliseconds: int | None) -> str:
    """A point in time in UTC, to the minute."""
    return f"{datetime.fromtimestamp(milliseconds / 1000, UTC):%Y-%m-%d %H:%M} UTC" if milliseconds else ""


# `hanzo-ml model data`


def data(
    name: Annotated[str, typer.Argument(help="Name of the model.")],
    version: Annotated[int, typer.Argument(help="Number of the version.")],
    as_json: JsonOption = False,
) -> None:
    """Show the training data of a version, and whether it holds personal data."""
    found = call("GET", f"/v1/models/{name}/versions/{version}/data")
    if as_json:
        print_json(found)
    else:
        print_data(found)


def print_data(found: dict[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True, width=10_000)
    root = Tree(sanitize_markup(f"{found['name']} version {found['version']}"))
    for use in found["datasets"]:
        branch = root.add(
            f"{sanitize_markup(use['dataset'])} [dim]{pluralize(use['records'], 'record')}, "
            f"{sanitize_markup(use['digest'][:12])}[/dim]"
        )
        for role, count in use["splits"].items():
            branch.add(f"{sanitize_markup(role)}: {'? records' if count is None else pluralize(count, 'record')}")
        if not use["splits"]:
            branch.add("used through what was made of it")
        if use["made_of"]:
            branch.add(f"made of {sanitize_markup(', '.join(use['made_of']))}")
        branch.add(f"transform: {sanitize_markup(format_transform(use['transform']))}")
        branch.add(f"personal data: {sanitize_markup(describe_personal_data(use['personal_data']))}")
    for uri in found["base_models"]:
        root.add(f"base model {sanitize_markup(uri)} [dim](its own training data is not recorded here)[/dim]")
    for logged in found["logged"]:
        root.add(
            f"logged by the run: {sanitize_markup(logged['name'])} [dim]{sanitize_markup(logged['digest'])}, not "
            "checked[/dim]"
        )
    console.print(root)
    if not found["datasets"]:
        console.print("no dataset is recorded for it")
    console.print(f"personal data in what it was trained on: {sanitize_markup(found['personal_data'])}")


def format_transform(value: Any) -> str:
    """A transform as `key value` pairs, nested keys joined by dots."""
    if not isinstance(value, dict):
        return str(value)
    return ", ".join(f"{key} {each}" for key, each in flatten_keys(value))


def flatten_keys(value: dict[str, Any], above: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, each in value.items():
        path = f"{above}{key}"
        pairs += flatten_keys(each, f"{path}.") if isinstance(each, dict) else [(path, each)]
    return pairs


def describe_personal_data(known: dict[str, Any]) -> str:
    """Whether personal data is included, with the evidence."""
    parts = [
        f"{what} {', '.join(f'{count:,} {kind}' for kind, count in known[key].items()) or 'nothing'}"
        for key, what in (("found", "a validation found"), ("masked", "its preparation masked"))
        if known[key] is not None
    ]
    return "; ".join([known["included"], *parts])
