"""`hanzo-ml up`, `down`, `status`, `config` and `server`: run the platform's programs."""

import importlib.util
import os
import subprocess
import sys
from typing import Annotated

import typer

from hanzo_ml.cli.connection import Refused

PYTHON = (sys.executable, "-P", "-m")
"""`-P` keeps the working directory off the path, which may hold another `api` or `resources`."""

RUN_MODULE_SCRIPT = """
import runpy, sys
try:
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
except KeyboardInterrupt:
    sys.exit(130)
"""
"""Runs a module of the platform without a traceback on Ctrl-C, also while it imports."""

server = typer.Typer(no_args_is_help=True, help="Run the tracking server alone, and manage its store.")
config = typer.Typer(no_args_is_help=True, help="Show the settings in force.")


def up() -> None:
    """Start the processes of the stack that are not running, and wait until they answer."""
    run_module("resources.stack.lifecycle", "up")


def down() -> None:
    """Stop the stack. Running jobs save a checkpoint; `hanzo-ml up` resumes them."""
    run_module("resources.stack.lifecycle", "down")


def status() -> None:
    """Show which processes of the stack are running."""
    run_module("resources.stack.lifecycle", "status")


@config.callback()
def settings() -> None:
    """Show the settings in force."""


@config.command("show")
def show() -> None:
    """Print the effective settings, with secrets masked."""
    run_module("resources.settings.settings")


@server.callback()
def tracking_server() -> None:
    """Run the tracking server alone, and manage its store."""


@server.command("run")
def run() -> None:
    """Serve the API alone, until Ctrl-C: tracking, registry and `/v1`, without Dagster and the engine."""
    require_platform()
    # Replace this process, so that signals reach the server when it is a container's first process.
    os.execv(sys.executable, [*PYTHON, "api.server"])


@server.command("migrate")
def migrate() -> None:
    """Migrate the metadata database to this release. `hanzo-ml up` does so by itself."""
    run_module("resources.metadata.migrate")


@server.command("reset")
def reset(
    yes: Annotated[bool, typer.Option("--yes", help="Confirm the deletion of everything (required).")] = False,
) -> None:
    """Delete everything in the store: experiments, runs, datasets, jobs and models. Refused in production mode."""
    run_module("resources.stack.reset", *(["--yes"] if yes else []))


def run_module(name: str, *arguments: str, given: str | None = None) -> None:
    """Run a module of the platform with `given` as its input.

    Exits with its code unless that is 0.
    """
    require_platform()
    code = subprocess.run(
        [sys.executable, "-P", "-c", RUN_MODULE_SCRIPT, name, *arguments],
        check=False,
        input=given,
        text=True,
        env={**os.environ, "PYTHONIOENCODING": f"{sys.stdout.encoding}:replace"},  # a terminal may lack characters
    ).returncode
    if code:
        raise typer.Exit(code)


def require_platform() -> None:
    """Raises Refused if only the client is installed."""
    if importlib.util.find_spec("resources") is None:
        raise Refused("the platform is not installed on this machine: this command needs more than the client")
