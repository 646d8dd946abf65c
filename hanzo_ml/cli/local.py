"""`hanzo-ml up`, `down`, `status`, `config show`, `server reset`: the stack of this machine, by the platform's own programs.

They run as processes, because the command line must also work where only the client is installed.
"""

import importlib.util
import subprocess
import sys
from typing import Annotated

import typer

from hanzo_ml.cli.connection import Refused

server = typer.Typer(no_args_is_help=True, help="The tracking server's store.")
config = typer.Typer(no_args_is_help=True, help="The settings in force.")


def up() -> None:
    """Start whatever of the stack does not run, and wait until it answers."""
    module("resources.stack", "up")


def down() -> None:
    """End the stack. Running jobs save a checkpoint; `hanzo-ml up` goes on with them."""
    module("resources.stack", "down")


def status() -> None:
    """What runs."""
    module("resources.stack", "status")


@config.callback()
def settings() -> None:
    """The settings in force."""


@config.command("show")
def show() -> None:
    """Print the effective settings, with secrets masked."""
    module("resources.settings")


@server.callback()
def tracking_server() -> None:
    """The tracking server's store."""


@server.command("reset")
def reset(yes: Annotated[bool, typer.Option("--yes", help="Really delete everything.")] = False) -> None:
    """Empty the store: every experiment, run, dataset, job and model. Refused in production mode."""
    module("resources.reset", *(["--yes"] if yes else []))


def module(name: str, *arguments: str, given: str | None = None) -> None:
    """Run a program of the platform, with what it is `given` as its input. Exits with its code where that is not 0."""
    if importlib.util.find_spec("resources") is None:
        raise Refused("the platform is not installed on this machine: this command needs more than the client")
    code = subprocess.run([sys.executable, "-m", name, *arguments], check=False, input=given, text=True).returncode
    if code:
        raise typer.Exit(code)
