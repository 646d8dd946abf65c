"""Resolve a reference to a tokenizer."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlparse

from pydantic import JsonValue

from recipes.contracts.recipe import Recipe
from recipes.storage.checksums import hash_file
from recipes.storage.manifest import canonical_json

RECIPE_PREFIX = "recipe:"
TOKENIZER_SUFFIXES = frozenset({".json", ".jinja", ".txt", ".model", ".tiktoken"})
EXTRA_TEMPLATES = "additional_chat_templates/*.jinja"


def parse_folder(reference: str) -> Path | None:
    """Return the folder that a reference names, existing or not; transformers accepts paths as well."""
    if reference.startswith("file://"):
        return Path(unquote(urlparse(reference).path))
    return Path(reference) if reference.startswith("/") else None


def find_recipe(reference: str) -> Recipe | None:
    """Return the recipe whose tokenizer is referenced, if any. Raises BadConfiguration if it is unknown."""
    return Recipe.named(reference.removeprefix(RECIPE_PREFIX)) if reference.startswith(RECIPE_PREFIX) else None


def describe_reference(reference: str) -> dict[str, JsonValue]:
    """Return the current content behind a reference, as far as it is known.

    Empty for hub models. It is part of a preparation's identity: otherwise the same name returned results prepared with
    earlier files.

    Raises:
        BadConfiguration: it references an unknown recipe.
    """
    if recipe := find_recipe(reference):
        return {"of_recipe": recipe.base_model.model_dump(mode="json")}
    folder = parse_folder(reference)
    return {} if folder is None else {"of_folder": hash_tokenizer_files(folder)}


def hash_tokenizer_files(folder: Path) -> str:
    """Hash a tokenizer's files.

    Unreadable files are skipped; the program reports them.
    """
    found: dict[str, JsonValue] = {}
    for path in list_tokenizer_files(folder):
        try:
            found[path.relative_to(folder).as_posix()] = hash_file(path)
        except OSError:
            continue
    return hashlib.sha256(canonical_json(found)).hexdigest()


def list_tokenizer_files(folder: Path) -> Iterator[Path]:
    """Yield tokenizer files only, without subfolders.

    A folder may contain a whole model and its checkpoints, or a whole disk.
    """
    try:
        entries = list(folder.iterdir())
    except OSError:
        return
    yield from sorted(
        path for path in (*entries, *folder.glob(EXTRA_TEMPLATES)) if path.suffix in TOKENIZER_SUFFIXES and path.is_file()
    )
