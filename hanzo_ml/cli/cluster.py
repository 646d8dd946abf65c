"""`hanzo-ml cluster` and `hanzo-ml tenant`: prepare a Kubernetes cluster for jobs."""

from pathlib import Path
from typing import Annotated

import typer

from hanzo_ml.cli.connection import Refused
from hanzo_ml.cli.local import run_module

app = typer.Typer(no_args_is_help=True, help="Prepare a Kubernetes cluster for jobs, and find what it lacks.")
tenant = typer.Typer(no_args_is_help=True, help="Namespaces of organizations on a Kubernetes cluster.")

TENANTS = "resources.compute.kubernetes.setup.tenants"
Organization = Annotated[str, typer.Argument(help="Id of the organization, as tokens name it.")]
Administrator = Annotated[
    Path | None,
    typer.Option(help="Administrator's kubeconfig; kubectl's own when unset."),
]


@app.command()
def render() -> None:
    """Print the objects that jobs need on a cluster, for `kubectl apply -f -`.

    As YAML: namespaces, roles, network policies, and queues with the quota of
    `scheduler.capacity` in the settings. Nothing is applied.
    """
    run_module("resources.compute.kubernetes.setup.render")


@app.command()
def check(
    kubeconfig: Annotated[
        Path | None,
        typer.Option(help="File that names the cluster; scheduler.kubeconfig or kubectl's own when unset."),
    ] = None,
    pods: Annotated[
        bool, typer.Option("--pods", help="Also start two pods of the default image that connect to each other.")
    ] = False,
) -> None:
    """List what a cluster lacks for jobs, each with the command that adds it.

    Exits with 1 where something is missing.
    """
    options = [*kubeconfig_option(kubeconfig), *(["--pods"] if pods else [])]
    run_module("resources.compute.kubernetes.setup.check", *options)


@tenant.command("apply")
def apply_tenant(
    organization: Organization,
    kubeconfig: Administrator = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the objects as YAML and apply nothing.")] = False,
) -> None:
    """Create or update the namespace in which an organization's jobs run.

    Quota, limits, roles, network policy and queue included. Needs
    scheduler.namespace_per_organization.
    """
    run_module(TENANTS, *kubeconfig_option(kubeconfig), *(["--dry-run"] if dry_run else []), "--", "apply", organization)


@tenant.command("list")
def list_tenants(kubeconfig: Administrator = None) -> None:
    """List organizations that have a namespace, with its name."""
    run_module(TENANTS, *kubeconfig_option(kubeconfig), "list")


@tenant.command("delete")
def delete_tenant(
    organization: Organization,
    kubeconfig: Administrator = None,
    yes: Annotated[bool, typer.Option("--yes", help="Confirm the deletion (required).")] = False,
) -> None:
    """Delete an organization's namespace, and end the jobs in it.

    Its runs, datasets and models stay. Jobs that have not ended wait until
    the namespace is applied again.
    """
    if not yes:
        raise Refused(f"this ends all jobs of {organization}: confirm it with --yes")
    run_module(TENANTS, *kubeconfig_option(kubeconfig), "--", "delete", organization)


def kubeconfig_option(file: Path | None) -> list[str]:
    return ["--kubeconfig", str(file)] if file else []
