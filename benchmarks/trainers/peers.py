"""Other trainers, each in a separate environment created on first use."""

import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

from recipes.machine import read_machine

INSTALL_SECONDS = 1800


@dataclass(frozen=True)
class Peer:
    """A trainer: `module` of this package runs in an environment with `packages`.

    `gpu` states that it requires one. `for_gpus` are packages that come with `packages`, are not needed for texts, and only
    work with a PyTorch for GPUs: without a GPU they are uninstalled.
    """

    name: str
    module: str
    packages: tuple[str, ...]
    gpu: bool = False
    for_gpus: tuple[str, ...] = ()


TORCH = "torch==2.13.0"
"""Our version, for all trainers that support it, because the layers above it are compared."""
PEERS = (
    Peer(
        "TRL",
        "with_trl",
        ("trl==1.16.0", TORCH, "transformers==5.23.0", "peft==0.21.2", "accelerate==1.15.0"),
    ),
    Peer("LLaMA-Factory", "with_llama_factory", ("llamafactory==0.9.5", TORCH), for_gpus=("torchaudio", "torchvision")),
    Peer("Axolotl", "with_axolotl", ("axolotl==0.19.0", TORCH)),
    Peer("Unsloth", "with_unsloth", ("unsloth", TORCH), gpu=True),
)
VARIANTS = ("default", "packing")


class DoesNotRun(Exception):
    """Why a peer is skipped, in one line."""


def peer_program(peer: Peer) -> str:
    """Return the module that trains with a peer, in the peer's environment."""
    return f"{__package__}.{peer.module}"


def peer_python(peer: Peer, cache: Path) -> str:
    """Return the Python of the peer's environment.

    Raises:
        DoesNotRun: it needs a GPU and there is none, or its installation failed, which is retried next time.
    """
    gpus = read_machine().gpus
    if peer.gpu and not gpus:
        raise DoesNotRun("needs a GPU")
    folder = cache / peer.module.removeprefix("with_")
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        print(f"installing {' '.join(peer.packages)} into {folder}", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        pip(python, "install", *peer.packages)
        if peer.for_gpus and not gpus:
            pip(python, "uninstall", "--yes", *peer.for_gpus)
        (folder / "complete").touch()
    return str(python)


def pip(python: Path, verb: str, *arguments: str) -> None:
    """Run pip. Raises DoesNotRun with its last error."""
    command = [str(python), "-m", "pip", verb, "--quiet", "--disable-pip-version-check", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise DoesNotRun(f"does not install within {INSTALL_SECONDS} s") from None
    if done.returncode:
        raise DoesNotRun(f"does not install: {last_line(done.stderr)}")


def last_line(text: str) -> str:
    """Return a program's last output line, or pip's last error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it said nothing"])[-1][:300]
