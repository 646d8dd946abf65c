"""`hanzo-ml dataset`: versions that nobody can change."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from hanzo_ml.cli.connection import Refused, call
from hanzo_ml.cli.output import AsJson, show, table
from hanzo_ml.cli.prepare import prepare

app = typer.Typer(no_args_is_help=True, help=__doc__)
app.command()(prepare)


@app.command()
def create(
    name: Annotated[str, typer.Option(help="Name of the dataset.")],
    path: Annotated[Path, typer.Option(help="A file, or a folder of files.")],
    format: Annotated[str, typer.Option(help="jsonl")] = "jsonl",
    tag: Annotated[list[str] | None, typer.Option(help="A tag to find it by; may be repeated.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a version of the files at --path. The same content never makes a second version."""
    if not path.exists():
        raise Refused(f"there is no file or folder {path}: check --path")
    files = sorted(path.rglob(f"*.{format}")) if path.is_dir() else [path]
    if not files:
        raise Refused(f"folder {path} holds no *.{format} file: check --path and --format")
    with ExitStack() as opened:
        parts = []
        for file in files:
            relative = file.relative_to(path).as_posix() if path.is_dir() else file.name
            parts.append(("files", (relative, opened.enter_context(file.open("rb")))))
        made = call("POST", "/v1/datasets", data={"name": name, "format": format, "tags": tag or []}, files=parts)
    if as_json:
        show(made)
        return
    what = "created" if made["created"] else "is there already with this content"
    print(
        f"{made['name']}@{made['version']} {what}: {made['num_records']} records, "
        f"{made['size_bytes']} bytes, id {made['id']}"
    )


@app.command("list")
def list_versions(name: Annotated[str | None, typer.Option()] = None, as_json: AsJson = False) -> None:
    """All versions, newest last."""
    found = call("GET", "/v1/datasets", params={"name": name} if name else {})["datasets"]
    if as_json:
        show(found)
        return
    rows = [
        (f"{v['name']}@{v['version']}", v["num_records"], v["size_bytes"], "yes" if v["splits"] else "not yet")
        for v in found
    ]
    table(
        ("dataset", "records", "bytes", "split"), rows, "no dataset yet: `hanzo-ml dataset create --name NAME --path FILE`"
    )
