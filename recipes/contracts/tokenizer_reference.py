"""What the name of a tokenizer means: a folder of this machine, a recipe's base model, or a model of the hub."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlparse

from pydantic import JsonValue

from recipes.canonical_json import canonical_json
from recipes.contracts.recipe import Recipe
from recipes.storage.local_artifact import sha256_of

RECIPE = "recipe:"
SUFFIXES = frozenset({".json", ".jinja", ".txt", ".model", ".tiktoken"})
MORE_TEMPLATES = "additional_chat_templates/*.jinja"


def folder_named(reference: str) -> Path | None:
    """The folder that a reference names, whether it is there or not. Transformers takes a path for one, too."""
    if reference.startswith("file://"):
        return Path(unquote(urlparse(reference).path))
    return Path(reference) if reference.startswith("/") else None


def recipe_named(reference: str) -> Recipe | None:
    """The recipe whose base model's tokenizer a reference names, if it names one. Raises BadConfiguration: there is none."""
    return Recipe.named(reference.removeprefix(RECIPE)) if reference.startswith(RECIPE) else None


def meaning(reference: str) -> dict[str, JsonValue]:
    """What a reference means today, so far as it can be known from here: of a model of the hub, nothing.

    The same name once gave what had been prepared with the files of before.

    Raises:
        BadConfiguration: it names no recipe.
    """
    if recipe := recipe_named(reference):
        return {"of_recipe": recipe.base_model.model_dump(mode="json")}
    folder = folder_named(reference)
    return {} if folder is None else {"of_folder": files_digest(folder)}


def files_digest(folder: Path) -> str:
    """SHA-256 of a tokenizer's files. One that cannot be read counts as none: the program says what is wrong with it."""
    found: dict[str, JsonValue] = {}
    for path in tokenizer_files(folder):
        try:
            found[path.relative_to(folder).as_posix()] = sha256_of(path)
        except OSError:
            continue
    return hashlib.sha256(canonical_json(found)).hexdigest()


def tokenizer_files(folder: Path) -> Iterator[Path]:
    """No others, and none below: beside them lies a whole model as a rule, and its checkpoints; or a whole disk."""
    try:
        beside = list(folder.iterdir())
    except OSError:
        return
    yield from sorted(path for path in (*beside, *folder.glob(MORE_TEMPLATES)) if path.suffix in SUFFIXES and path.is_file())
