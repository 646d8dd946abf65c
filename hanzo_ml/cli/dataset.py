"""Create, inspect, check and prepare dataset versions."""

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import typer
from rich.console import Console

from hanzo_ml.cli import dataset_checkout as checking_out
from hanzo_ml.cli.connection import Refused, call, error_message, tracking_uri
from hanzo_ml.cli.dataset_preparation import features, prepare
from hanzo_ml.cli.dataset_reference import Reference, find_version, iterate_versions
from hanzo_ml.cli.dataset_upload import (
    SOURCE_PREFIXES,
    continue_topic,
    detect_format,
    parse_metadata,
    request_query,
    send_address,
    send_files,
    send_query,
    show_progress,
)
from hanzo_ml.cli.output import JsonOption, escape_json_controls, print_json, print_table, sanitize_text
from hanzo_ml.client.transport import authorization_header
from recipes.contracts.dataset_formats import Format
from recipes.contracts.quantities import pluralize
from recipes.records.conversation import describe_unread

app = typer.Typer(no_args_is_help=True, help=__doc__)
app.command()(prepare)
app.command()(features)

Records = Annotated[bool, typer.Option("--records", help="Fetch the records as JSON lines instead of the uploaded files.")]
Split = Annotated[
    Literal["train", "validation", "test"] | None,
    typer.Option(help="Fetch one split; of a prepared version with its tokens."),
]
Rejected = Annotated[bool, typer.Option("--rejected", help="Fetch what a preparation rejected: file, line and reason.")]


@app.command()
def create(
    name: Annotated[str, typer.Option(help="Name of the dataset; created if it does not exist.")],
    path: Annotated[
        str | None,
        typer.Option(
            help="File or folder to upload; or s3://..., file://... or kafka://BROKER/TOPIC for the server to fetch."
        ),
    ] = None,
    format: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(Format)}; detected from file names by default.")
    ] = None,
    sql: Annotated[str | None, typer.Option(help="Query whose rows become the records; needs --database.")] = None,
    database: Annotated[
        str | None,
        typer.Option(
            help="sqlite:///FILE or postgresql://..., queried from here; or a name in storage.databases of the server."
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="NAME@VERSION", help="Read a Kafka topic from where this version ended."),
    ] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Tag of the version; repeatable.")] = None,
    metadata: Annotated[list[str] | None, typer.Option(help="KEY=VALUE; repeatable.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Create a version from the files at --path or the rows of --sql.

    Equal content never makes a second version.
    """
    if (path is None) == (sql is None) or (sql is None) != (database is None):
        raise Refused("no source: use --path, or --sql together with --database")
    if sql is not None and format is not None:
        raise Refused("--format describes the files at --path, and rows of --sql have no format: remove it")
    if since is not None:
        path = continue_topic(str(path), find_version(since))
    is_read_here = database is not None and "://" in database
    extra = parse_metadata([*(metadata or []), *([f"sql={sql}"] if is_read_here else [])])
    found = "jsonl" if path is None else format or detect_format(path)
    fields = {"name": name, "format": found, "tags": tag or [], "metadata": extra}
    if sql is not None and database is not None:
        made = send_query(database, sql, fields) if is_read_here else request_query(database, sql, fields)
    elif str(path).startswith(SOURCE_PREFIXES):
        made = send_address(str(path), fields)
    else:
        made = send_files(str(path), fields)
    if as_json:
        print_json(made)
        return
    what = "created" if made["created"] else "exists already with this content"
    print(
        f"{made['name']}@{made['version']} {what}: {pluralize(made['num_records'], 'record')}, "
        f"{pluralize(made['size_bytes'], 'byte')}, id {made['id']}"
    )
    if skipped := made.get("skipped"):
        print(f"skipped (hidden, empty or without records): {', '.join(map(sanitize_text, skipped))}")
    if unread := made.get("unread"):
        print(f"not rendered, because the serving engine drops it: {sanitize_text(describe_unread(unread))}")
    if ignored := made.get("not_taken"):
        print(describe_ignored_fields(made, ignored))


def describe_ignored_fields(version: dict[str, Any], ignored: dict[str, Any]) -> str:
    """Describe what an existing version did not adopt, and how to set it."""
    reference = f"{version['name']}@{version['version']}"
    what = [f"{field} {ignored[field] if field == 'format' else ', '.join(ignored[field])}" for field in ignored]
    how = []
    if "tags" in ignored:
        how.append(f"`hanzo-ml dataset tag {shlex.join([reference, *version['tags'], *ignored['tags']])}` sets its tags")
    if "metadata" in ignored:
        how.append(f"PATCH /v1/datasets/{version['id']} its metadata")
    return "; ".join([f"ignored, because sending a version again does not change it: {', '.join(what)}", *how])


@app.command("list")
def list_versions(
    name: Annotated[str | None, typer.Option(help="Only versions of this dataset.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Only versions with this tag; repeatable.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List versions, newest last.

    `dataset check NAME@VERSION` shows why one is blocked, or what its problem is.
    """
    found = list(iterate_versions(name, tag or ()))
    if as_json:
        print_json(found)
        return
    rows = [
        (
            f"{v['name']}@{v['version']}",
            v["num_records"],
            v["size_bytes"],
            v["format"],
            "yes" if v["splits"] else "not yet",
            "problem" if v["checks"]["problem"] else v["checks"]["status"],
        )
        for v in found
    ]
    hint = "no dataset yet: `hanzo-ml dataset create --name NAME --path FILE`"
    print_table(("dataset", "records", "bytes", "format", "split", "checks"), rows, hint)


@app.command("show")
def show_version(reference: Reference) -> None:
    """Show everything known of a version, as JSON."""
    print_json(find_version(reference))


@app.command()
def preview(
    reference: Reference, n: Annotated[int, typer.Option("-n", min=1, max=1000, help="Number of records.")] = 10
) -> None:
    """Print the first records, one JSON line each."""
    address = f"{tracking_uri()}/v1/datasets/{find_version(reference)['id']}/preview"
    answer = httpx.get(address, params={"n": n}, headers=authorization_header(), timeout=60, trust_env=False)
    if answer.is_error:
        raise Refused(error_message(answer))
    print(escape_json_controls(answer.text), end="")


@app.command()
def diff(
    old: Annotated[str, typer.Argument(metavar="NAME@VERSION", help="The version to compare with.")],
    new: Annotated[str, typer.Argument(metavar="NAME@VERSION", help="The version that is compared.")],
    key: Annotated[str | None, typer.Option(help="Column that identifies a record in both versions.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what changed from one version to another."""
    params = {"against": find_version(old)["id"], **({"key": key} if key else {})}
    found = call("GET", f"/v1/datasets/{find_version(new)['id']}/diff", params=params)
    print_json(found) if as_json else print_diff(found)


def print_diff(found: dict[str, Any]) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)

    def say(line: str, style: str | None = None) -> None:
        console.print(sanitize_text(line), style=style)

    counts = [(kind, found[kind]) for kind in ("added", "removed", "changed", "unchanged") if found[kind] is not None]
    say(f"{found['old']['reference']} -> {found['new']['reference']}: " + ", ".join(f"{n} {k}" for k, n in counts))
    for column, kinds in found["schema_added"].items():
        say(f"  + column {column}: {kinds}", "green")
    for column, kinds in found["schema_removed"].items():
        say(f"  - column {column}: {kinds}", "red")
    for column, (before, after) in found["schema_changed"].items():
        say(f"  ~ column {column}: {before} -> {after}", "yellow")
    for kind, sign, style in (("added", "+", "green"), ("removed", "-", "red"), ("changed", "~", "yellow")):
        for record in found["examples"].get(kind, []):
            say(f"  {sign} {record}"[:200], style)


@app.command()
def checkout(
    reference: Reference,
    to: Annotated[Path, typer.Option(help="Output directory; created if missing, must be empty.")],
    records: Records = False,
    split: Split = None,
    rejected: Rejected = False,
) -> None:
    """Download the exact files of a version and verify each. Continues where it was interrupted."""
    version = find_version(reference)
    content = choose_content(records, split, rejected)

    def links() -> list[checking_out.RemoteFile]:
        return [checking_out.RemoteFile.from_json(file) for file in download_links(version, content)["files"]]

    with show_progress("fetching", None) as report_progress:
        try:
            size = checking_out.checkout_files(links, to, f"{version['id'][:8]}-{content}", report_progress)
        except checking_out.CheckoutError as problem:
            raise Refused(str(problem)) from None
    print(f"{version['name']}@{version['version']} is in {to}: {pluralize(size, 'byte')}, every SHA-256 matches")


@app.command()
def download(
    reference: Reference,
    records: Records = False,
    split: Split = None,
    rejected: Rejected = False,
    as_json: JsonOption = False,
) -> None:
    """Print signed addresses from which a version can be downloaded for one hour."""
    found = download_links(find_version(reference), choose_content(records, split, rejected))
    if as_json:
        print_json(found)
        return
    for file in found["files"]:
        for part in file["parts"]:
            print(f"{file['path']}\t{part['url']}")


@app.command()
def lineage(reference: Reference, as_json: JsonOption = False) -> None:
    """Show what a version was made from, and what was made from it."""
    found = call("GET", f"/v1/datasets/{find_version(reference)['id']}/lineage")
    if as_json:
        print_json(found)
        return
    console = Console(highlight=False, markup=False, soft_wrap=True)
    parents = [
        *found["origins"],
        *(f"dataset {name}" for name in found["parents"]),
        *(each["name"] for each in found["made_from"]),
    ]
    for parent in dict.fromkeys(parents):
        console.print(sanitize_text(f"  ↑ {parent}"))
    console.print(sanitize_text(f"{found['dataset']}  (transform: {found['transform']})"))
    children = [*(f"dataset {name}" for name in found["children"]), *(each["name"] for each in found["made_into"])]
    for child in dict.fromkeys(children):
        console.print(sanitize_text(f"  ↓ {child}"))


@app.command()
def tag(
    reference: Reference,
    tags: Annotated[list[str], typer.Argument(help="All tags of the version; they replace those it has.")],
) -> None:
    """Replace the tags of a version."""
    changed = call("PATCH", f"/v1/datasets/{find_version(reference)['id']}", json={"tags": tags})
    print(f"{changed['name']}@{changed['version']}: {', '.join(changed['tags'])}")


@app.command()
def delete(
    reference: Reference, yes: Annotated[bool, typer.Option("--yes", help="Confirm the deletion (required).")] = False
) -> None:
    """Delete a version that no run, job or other version refers to."""
    version = find_version(reference)
    if not yes:
        raise Refused(f"this deletes {version['name']}@{version['version']} permanently: confirm with --yes")
    print(f"{call('DELETE', '/v1/datasets/' + version['id'])['deleted']} is deleted")


def choose_content(records: bool, split: str | None, rejected: bool) -> str:
    """Which content of a version to fetch, as the API names it."""
    wanted = [word for word, asked in (("records", records), (split, split), ("rejected", rejected)) if asked and word]
    if len(wanted) > 1:
        raise Refused("--records, --split and --rejected exclude each other: use one of them")
    return wanted[0] if wanted else "source"


def download_links(version: dict[str, Any], content: str) -> Any:
    return call("GET", f"/v1/datasets/{version['id']}/download", params={"content": content})
