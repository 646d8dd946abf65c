"""`hanzo-ml up`, `down`, `status`, `config show`: the stack of this machine, by the platform's own programs.

They run as processes, because the command line must also work where only the client is installed.
"""

import importlib.util
import subprocess
import sys

import typer

from hanzo_ml.cli.connection import Refused

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


def module(name: str, *arguments: str) -> None:
    """Run a program of the platform. Exits with its code where that is not 0."""
    if importlib.util.find_spec("resources") is None:
        raise Refused("the platform is not installed on this machine: this command needs more than the client")
    code = subprocess.run([sys.executable, "-m", name, *arguments], check=False).returncode
    if code:
        raise typer.Exit(code)
