"""`hanzo-ml cluster`: prepare a Kubernetes cluster for jobs, and find what it lacks."""

from pathlib import Path
from typing import Annotated

import typer

from hanzo_ml.cli.local import run_module

app = typer.Typer(no_args_is_help=True, help=__doc__)


@app.command()
def render() -> None:
    """Print what a cluster needs for jobs, as YAML for `kubectl apply -f -`.

    Roles of the control plane, and queues with the quota that the settings
    say in `scheduler.capacity`. Nothing is applied.
    """
    run_module("resources.compute.kubernetes.setup.queues")


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
    """List what a cluster lacks for jobs, each with the command that mends it.

    Exits with 1 where something is missing.
    """
    options = [*(["--kubeconfig", str(kubeconfig)] if kubeconfig else []), *(["--pods"] if pods else [])]
    run_module("resources.compute.kubernetes.setup.check", *options)
