"""Verify a base model in a local folder.

Complete, and with the hash that the recipe pins.
"""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from recipes.contracts.job import BadConfiguration
from recipes.contracts.recipe_references import BaseModelRef
from recipes.storage.artifact_store import describe_files
from recipes.storage.manifest import Manifest

REQUIRED_FILES = ("tokenizer.json", "tokenizer_config.json")
"""Required in addition to `config.json` and weights: the tokenizer and its chat template."""
WEIGHTS_INDEX = "model.safetensors.index.json"


def verify_model_folder(reference: BaseModelRef) -> Path:
    """Verify and hash a base model's folder, at about 2 GB/s, and return it.

    Raises:
        BadConfiguration: it is missing or incomplete, or its hash differs from the recipe's.
    """
    folder = reference.folder
    if problem := reference.missing_folder_problem:
        raise BadConfiguration(problem)
    if problem := find_folder_problem(folder):
        raise BadConfiguration(f"base model {reference.uri} {problem}: copy it again, then pin its new hash")
    verify_pinned_hash(reference, hash_model_folder(folder))
    return folder


def verify_pinned_hash(reference: BaseModelRef, found: str) -> None:
    if found != reference.sha256:
        raise BadConfiguration(
            f"base model {reference.uri} has SHA-256 {found}, the recipe pins {reference.sha256}: "
            "correct the recipe if the change is intended"
        )


def find_folder_problem(folder: Path) -> str | None:
    """Return what a model folder lacks for training or publishing, or None."""
    weights = sorted(folder.glob("*.safetensors"))
    index = folder / WEIGHTS_INDEX
    named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()) if index.is_file() else set()
    missing = sorted({*REQUIRED_FILES, *named} - {file.name for file in folder.iterdir()})
    if missing or not weights:
        return f"has no {missing[0] if missing else 'safetensors file'} in {folder}"
    for file in weights:
        try:
            with safe_open(file, framework="numpy"):  # reads its header and checks the file's length against it
                pass
        except SafetensorError as error:
            return f"has a broken {file.name} ({' '.join(str(error).split())})"
    return None


def hash_model_folder(folder: Path) -> str:
    """Return the hash that pins a model folder.

    The SHA-256 of the manifest of its files.
    """
    return Manifest(kind="folder", files=describe_files(folder)).digest
