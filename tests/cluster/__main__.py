"""Command line of the test cluster."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from tests.cluster import processes
from tests.cluster.build import BuildError, Cache, compile_components
from tests.cluster.cluster import GPUS, NODES, Cluster
from tests.cluster.debian import Unsupported
from tests.cluster.images import build_images
from tests.cluster.product_images import build_product_images

app = typer.Typer(no_args_is_help=True, add_completion=False, help="A real Kubernetes cluster on this machine, for tests.")
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
State = Annotated[Path | None, typer.Option(help="Folder of the cluster's state; the default belongs to this checkout.")]


@app.command()
def build() -> None:
    """Compile the cluster's programs and build its images, where the cache lacks them."""
    compile_components(Cache())
    build_images(Cache())
    build_product_images(Cache())


@app.command()
def up(
    state: State = None,
    nodes: Annotated[int, typer.Option(envvar="NODES", help="Number of nodes.")] = NODES,
    gpus: Annotated[int, typer.Option(help="Simulated GPUs of each node.")] = GPUS,
) -> None:
    """Start a cluster, after removing the remains of an earlier one."""
    Cluster(state).up(nodes, gpus)


@app.command()
def load(state: State = None) -> None:
    """Load control plane and engine images with this checkout's code on the nodes."""
    Cluster(state).load_product_images()


@app.command()
def down(state: State = None) -> None:
    """Stop the cluster and remove all that it has on this machine."""
    Cluster(state).down()


@app.command()
def status(state: State = None) -> None:
    """Print the cluster's addresses and nodes."""
    cluster = Cluster(state)
    if not cluster.is_running():
        print(f"no cluster runs in {cluster.state}")
        raise typer.Exit(1)
    print(f"state       {cluster.state}")
    print(f"namespace   {cluster.namespace}    (nsenter --net=/run/netns/{cluster.namespace} COMMAND)")
    print(f"kubectl     {cluster.state / 'kubectl'}")
    print(f"kubeconfig  {cluster.kubeconfig}")
    print(f"S3          {cluster.s3.url}    {cluster.s3.access_key} {cluster.s3.secret_key}")
    print(f"PostgreSQL  {cluster.postgres.url()}")
    print(cluster.kubectl("get", "nodes", "--output=wide"), end="")


@app.command(context_settings=PASS_ON)
def kubectl(context: typer.Context) -> None:
    """Run kubectl on this checkout's cluster."""
    execute(Cluster().kubectl_command(*context.args))


@app.command("exec", context_settings=PASS_ON)
def run_inside(context: typer.Context) -> None:
    """Run a command in the network of this checkout's cluster."""
    execute(Cluster().command(*context.args))


def execute(command: list[str]) -> None:
    os.execvp(command[0], command)


try:
    app(prog_name="python -m tests.cluster")
except (BuildError, Unsupported, processes.NotReady) as problem:
    sys.exit(f"error: {problem}")
