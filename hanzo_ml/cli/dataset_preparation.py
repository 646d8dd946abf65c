"""`hanzo-ml dataset prepare` and `features`."""

import json
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from hanzo_ml.cli.config_errors import check_json, locate_refusal
from hanzo_ml.cli.connection import KeyOption, Refused, call, start_once
from hanzo_ml.cli.dataset_reference import Reference, find_version, iterate_versions
from hanzo_ml.cli.job import read_config
from hanzo_ml.cli.job_polling import wait_for_end
from hanzo_ml.cli.output import JsonOption, print_json
from recipes.contracts.quantities import pluralize

# `hanzo-ml dataset features`: features of a key, or of new rows.


def features(
    reference: Annotated[
        str,
        typer.Argument(metavar="NAME@VERSION", help="Dataset version; NAME alone means the newest version with features."),
    ],
    key: Annotated[str | None, typer.Option(help="Value of the features' key column.")] = None,
    rows: Annotated[Path | None, typer.Option(help="File of JSON lines to compute features of.")] = None,
) -> None:
    """Print the features of a key, or compute those of new rows, as JSON."""
    if (key is None) == (rows is None):
        raise Refused("nothing to look up: use --key, or --rows with a file of JSON lines")
    name, at, number = reference.partition("@")
    if not name or (at and not number.isdecimal()):
        raise Refused(f"'{reference}' is not a dataset: write NAME or NAME@VERSION, such as {name or 'my-data'}@1")
    params = {"version": number} if at else {}
    where = f"/v1/features/{quote(name, safe='')}"
    if rows is None:
        print_json(call("GET", f"{where}/{quote(key or '', safe='')}", params=params))
    else:
        print_json(call("POST", f"{where}/transform", params=params, json=read_rows(rows)))


def read_rows(path: Path) -> list[Any]:
    """Raises Refused for a line that is not JSON."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        try:
            found += [json.loads(line)] if line.strip() else []
        except ValueError as problem:
            raise Refused(f"{path}, line {number}: not JSON: {problem}") from None
    return found


def prepare(
    reference: Reference,
    config: Annotated[
        Path,
        typer.Option(help="Preparation file (YAML) with clean, tokenize, filter, features, augment, split, name, workers."),
    ],
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the version exists.")] = False,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a prepared version of another: clean, filter, mask, tokenize, shuffle, split."""
    document = read_config(config)
    check_json(document, config)
    path = f"/v1/datasets/{find_version(reference)['id']}/prepare"
    with locate_refusal(document, config):
        job = start_once(path, key, json=document)
    if wait:
        job = wait_for_end(job["id"])
    if job["status"] in ("failed", "cancelled"):
        raise Refused(f"job {job['id']} {job['status']}: {job['reason']}")
    if as_json:
        print_json(job)
    elif job["status"] == "completed":
        print(f"{describe_result(job)}, job {job['id']}")
    else:
        print(f"{job['id']} {job['status']}")


def describe_result(job: dict[str, Any]) -> str:
    """Describe the version that a job made; it makes none if the content existed before."""
    name, digest = job["config"]["name"], job["artifacts"]["dataset"]["digest"]
    for version in iterate_versions(name):
        if version["artifact"]["digest"] == digest:
            return f"{name}@{version['version']} created: {pluralize(version['num_records'], 'record')}"
    return f"{name} has a version with this content already"
