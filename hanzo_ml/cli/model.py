"""List, register, promote, undeploy and prove model versions."""

from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console
from rich.tree import Tree

from hanzo_ml.cli.connection import call, iterate_pages
from hanzo_ml.cli.output import JsonOption, print_json, print_table, sanitize_markup
from recipes.contracts.quantities import pluralize

app = typer.Typer(no_args_is_help=True, help=__doc__)


@app.command("list")
def list_versions(
    name: Annotated[str | None, typer.Option(help="Only versions of this model.")] = None, as_json: JsonOption = False
) -> None:
    """List versions with stage, status and deployment."""
    names = [name] if name else [model["name"] for model in iterate_pages("/v1/models", "models", {})]
    found = [
        version
        for model in names
        for version in iterate_pages(f"/v1/models/{quote(model, safe='')}/versions", "versions", {})
    ]
    if as_json:
        print_json(found)
        return
    rows = [
        (
            version["name"],
            version["version"],
            version["stage"],
            version["status"],
            describe_deployment(version),
            version["reason"] or (version["deployment"] or {}).get("reason", "") or describe_failures(version),
        )
        for version in found
    ]
    columns = ("model", "version", "stage", "status", "deployment", "reason")
    print_table(columns, rows, "no model version yet: `hanzo-ml job submit --model NAME` trains one")


def describe_deployment(version: dict[str, Any]) -> str:
    """The state of a version's deployment, and how many engine replicas serve it."""
    status = str((version["deployment"] or {}).get("status", "-"))
    replicas = version.get("replicas", [])
    serving = sum(replica["status"] == "serving" for replica in replicas)
    return f"{status} ({serving}/{len(replicas)} replicas)" if replicas else status


def describe_failures(version: dict[str, Any]) -> str:
    """What replicas of the engine that do not serve a version say."""
    said = [each for each in version.get("replicas", []) if each["status"] != "serving"]
    return "; ".join(f"{each['replica']}: {each['reason'] or each['status']}" for each in said)


@app.command()
def register(
    name: Annotated[str, typer.Option(help="Name of the model; created if it does not exist.")],
    run: Annotated[str, typer.Option(help="Id of the run.")],
    artifact: Annotated[str, typer.Option(help="Path of the run's artifact.")] = "checkpoint-final",
) -> None:
    """Register a run's artifact as the next version of a model."""
    version = call("POST", f"/v1/models/{name}/versions", json={"run_id": run, "artifact": artifact})
    found = version["tags"].get("hanzo.artifact")
    of = f", of the artifact {found}" if found else ""
    print(f"{version['name']} version {version['version']}: {version['stage']}, {version['status']}{of}")


@app.command()
def promote(
    name: Annotated[str, typer.Option(help="Name of the model.")],
    version: Annotated[int, typer.Option(help="Number of the version.")],
    stage: Annotated[str, typer.Option(help="New stage: none, staging, canary, production or archived.")],
    force: Annotated[bool, typer.Option("--force", help="Promote a quarantined version (admins only).")] = False,
) -> None:
    """Move a version to a stage. Stage production deploys it."""
    moved = call("PATCH", f"/v1/models/{name}/versions/{version}/stage", json={"stage": stage, "force": force})
    print(f"{moved['name']} version {moved['version']}: {moved['stage']}")
    if moved["stage"] == "production" and not moved["servable"]:
        print("it is not served: its files were not trained here, and the engine loads only what was")


@app.command()
def undeploy(name: Annotated[str, typer.Argument(help="Name of the model.")]) -> None:
    """Take a model out of service and archive its version in production.

    It can then be deleted or renamed.
    """
    left = call("DELETE", f"/v1/models/{name}/deployment")["deployments"]
    versions = ", ".join(str(deployment["version"]) for deployment in left)
    print(f"{name}: version {versions} is being taken out of service" if left else f"{name}: archived, nothing was served")


@app.command()
def prove(
    name: Annotated[str, typer.Argument(help="Name of the model.")],
    version: Annotated[int, typer.Argument(help="Number of the version.")],
    as_json: JsonOption = False,
) -> None:
    """Prove a version back to its raw files, hashing every byte again.

    Exits with 1 if an edge is broken.
    """
    proof = call("GET", f"/v1/models/{name}/versions/{version}/proof")
    if as_json:
        print_json(proof)
    else:
        print_proof(proof)
    if not proof["ok"]:
        raise typer.Exit(1)


def print_proof(proof: dict[str, Any]) -> None:
    # Rich cuts the lines of a tree at the console's width, and with them the reason of a broken edge.
    console = Console(highlight=False, soft_wrap=True, width=10_000)
    console.print(draw_proof(proof["chain"]))
    if proof["ok"]:
        console.print(f"[green]proved[/green]: {pluralize(proof['bytes_hashed'], 'byte')} hashed, every edge holds")
    for edge in proof["broken"]:
        console.print(f"[red]broken[/red] {sanitize_markup(edge)}")


def draw_proof(node: dict[str, Any], tree: Tree | None = None) -> Tree:
    """Draw a proof as a tree; broken nodes are red, with their reasons."""
    mark = "[red]✗[/red]" if node["problems"] else "[green]✓[/green]"
    size = f", {pluralize(node['files'], 'file')}, {pluralize(node['size_bytes'], 'byte')}" if node["files"] else ""
    facts = ", ".join(
        f"{key} {value}" for key, value in node["facts"].items() if isinstance(value, str | int) and key != "split"
    )
    name, digest = sanitize_markup(node["label"]), sanitize_markup(node["digest"][:12])
    label = f"{mark} {name} [dim]{digest}{size}[/dim]" + (f" [dim]({sanitize_markup(facts)})[/dim]" if facts else "")
    if node["seen_above"]:
        label = f"[dim]↑ {name} {digest}, shown above[/dim]"
    branch = tree.add(label) if tree else Tree(label)
    for problem in node["problems"]:
        branch.add(f"[red]{sanitize_markup(problem)}[/red]")
    for parent in node["made_from"]:
        draw_proof(parent, branch)
    return branch
