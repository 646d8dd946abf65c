"""`hanzo-ml dataset check` and `report`: show what validation found."""

from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

from hanzo_ml.cli.connection import Refused, call, error_message, tracking_uri
from hanzo_ml.cli.dataset_reference import Reference, find_version
from hanzo_ml.cli.job_polling import poll_until
from hanzo_ml.cli.output import JsonOption, print_json, sanitize_markup, sanitize_text
from hanzo_ml.client.transport import authorization_header

STATUS_TEXT = {"passed": "passed", "failed": "may be trained on: no check that failed blocks it", "blocked": "blocked"}


def check(
    reference: Reference,
    again: Annotated[bool, typer.Option("--again", help="Check the version again, by the contract as it is now.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the version was checked.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the checks of a version.

    Exits with 1 if one blocks it, or if it could not be checked or split.
    """
    path = f"/v1/datasets/{find_version(reference)['id']}/checks"
    before = read_attempt_times(call("GET", path)) if again else (None, None)
    if again:
        call("POST", path)

    def poll() -> dict[str, Any] | None:
        found: dict[str, Any] = call("GET", path)
        return found if read_attempt_times(found) != before else None

    found = poll_until(poll) if wait or again else call("GET", path)
    print_json(found) if as_json else print_checks(found)
    name = f"{found['name']}@{found['version']}"
    if found["problem"]:
        raise Refused(f"{name} {found['problem']}. Repair that, then run `hanzo-ml dataset check {name} --again`")
    if found["status"] == "blocked":
        raise Refused(f"{name} is neither split nor trained on: a check blocks it")


def read_attempt_times(found: dict[str, Any]) -> tuple[int | None, int | None]:
    """When a version was checked, and when that ended in a problem."""
    return found["checked_at"], found["problem_at"]


def print_checks(found: dict[str, Any]) -> None:
    console = Console(highlight=False)
    name = f"{found['name']}@{found['version']}"
    if found["status"] == "pending":
        if not found["problem"]:
            console.print(f"{name} was not checked yet: start the stack with `hanzo-ml up`", markup=False)
        return
    drawn = Table(box=None, pad_edge=False)
    for column in ("check", "verdict", "why"):
        drawn.add_column(column, overflow="fold", no_wrap=column == "check")
    for verdict in found["checks"]:
        word = "[green]passed[/green]" if verdict["passed"] else format_severity(verdict)
        drawn.add_row(
            sanitize_markup(verdict["check"]), word, sanitize_markup("\n".join(verdict["reasons"]) or verdict["note"])
        )
    console.print(drawn)
    if found["violations"]["first"]:
        console.print("\nfirst violations of the contract", style="bold")
        for each in found["violations"]["first"]:
            violation = f"  line {each['line']}  {each['column']}  {each['reason']}: {each['value']}"
            console.print(sanitize_text(violation), markup=False)
    console.print(f"\n{name} {STATUS_TEXT[found['status']]}", markup=False)


def format_severity(verdict: dict[str, Any]) -> str:
    color = "red" if verdict["severity"] == "error" else "yellow"
    return f"[{color}]{verdict['severity']}{', blocks' if verdict['blocking'] else ''}[/{color}]"


def report(
    reference: Reference,
    out: Annotated[Path | None, typer.Option(help="Output file; NAME-VERSION.html by default.")] = None,
) -> None:
    """Write one self-contained HTML page: schema, quality, plots, checks, drift, lineage, sample records."""
    version = find_version(reference)
    url = f"{tracking_uri()}/v1/datasets/{version['id']}/report"
    answer = httpx.get(url, timeout=60, trust_env=False, headers=authorization_header())
    if answer.is_error:
        raise Refused(error_message(answer))
    target = out or Path(f"{version['name']}-{version['version']}.html")
    try:
        target.write_bytes(answer.content)
    except OSError as error:
        raise Refused(f"cannot write {target} ({error.strerror}): choose another file with --out") from None
    print(target)
