"""Resolve what a tokenizer's name refers to."""

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
    """The folder that a reference names, whether it is there or not. Transformers takes a path for one, too."""
    if reference.startswith("file://"):
        return Path(unquote(urlparse(reference).path))
    return Path(reference) if reference.startswith("/") else None


def find_recipe(reference: str) -> Recipe | None:
    """The recipe whose base model's tokenizer a reference names, if it names one. Raises BadConfiguration: there is none."""
    return Recipe.named(reference.removeprefix(RECIPE_PREFIX)) if reference.startswith(RECIPE_PREFIX) else None


def describe_reference(reference: str) -> dict[str, JsonValue]:
    """What a reference means today, so far as it can be known from here: of a model of the hub, nothing.

    The same name once gave what had been prepared with the files of before.

    Raises:
        BadConfiguration: it names no recipe.
    """
    if recipe := find_recipe(reference):
        return {"of_recipe": recipe.base_model.model_dump(mode="json")}
    folder = parse_folder(reference)
    return {} if folder is None else {"of_folder": hash_tokenizer_files(folder)}


def hash_tokenizer_files(folder: Path) -> str:
    """SHA-256 of a tokenizer's files. One that cannot be read counts as none: the program says what is wrong with it."""
    found: dict[str, JsonValue] = {}
    for path in list_tokenizer_files(folder):
        try:
            found[path.relative_to(folder).as_posix()] = hash_file(path)
        except OSError:
            continue
    return hashlib.sha256(canonical_json(found)).hexdigest()


def list_tokenizer_files(folder: Path) -> Iterator[Path]:
    """No others, and none below: beside them lies a whole model as a rule, and its checkpoints; or a whole disk."""
    try:
        entries = list(folder.iterdir())
    except OSError:
        return
    yield from sorted(
        path for path in (*entries, *folder.glob(EXTRA_TEMPLATES)) if path.suffix in TOKENIZER_SUFFIXES and path.is_file()
    )
