"""Export a Hugging Face tokenizer to files that workers load without transformers."""

import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from recipes.contracts.frozen_model import FrozenModel
from recipes.contracts.job import BadConfiguration, StoreAddress
from recipes.contracts.parameters import TokenizeParameters
from recipes.contracts.rendering import CURRENT_RENDERING, Rendering
from recipes.contracts.tokenizer_reference import find_recipe, parse_folder
from recipes.export import base_model
from recipes.preparation.plan import atomic_path
from recipes.preparation.tokenization.chat_template import Templates, make_chat_template
from recipes.records.conversation import UnfitRecord
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import canonical_json

# The files of a tokenizer for workers: the fast implementation's file, and one with other settings.

FROZEN_FILE = "frozen.json"
TOKENIZER_FILE = "tokenizer.json"


class FrozenTokenizer(FrozenModel):
    """Settings of an exported tokenizer.

    Attributes:
        template: the chat template, or several by name.
        around: constants that the template puts around a plain question, so that workers need not load the template.
        special: special tokens by name.
        eos: id of the end token.
        padding: id of the padding token.
        fingerprint: hash that is equal for tokenizers with equal behaviour.
        rendering: how records become texts.
    """

    template: str | dict[str, str] | None
    around: tuple[str, str] | None
    special: dict[str, JsonValue]
    eos: int
    padding: int
    fingerprint: str
    rendering: Rendering = CURRENT_RENDERING


def read_frozen_tokenizer(folder: Path) -> FrozenTokenizer:
    return FrozenTokenizer.model_validate_json((folder / FROZEN_FILE).read_bytes())


# Export a tokenizer by name, using transformers once.
#
# transformers takes a second to load a tokenizer, with torch three seconds and 250 MB, which every worker would pay.


def export_tokenizer(parameters: TokenizeParameters, address: StoreAddress, cache: Path, folder: Path) -> None:
    """Export a tokenizer's two files to `folder`, unless they exist.

    Raises:
        BadConfiguration: the tokenizer is unknown, or lacks a fast implementation or an end token.
    """
    if not (folder / FROZEN_FILE).is_file():
        write_tokenizer_files(
            load_tokenizer(parameters.tokenizer, resolve_source(parameters.tokenizer, Store(address), cache)),
            folder,
            parameters,
        )


def export_without_torch(parameters: TokenizeParameters, address: StoreAddress, cache: Path, folder: Path) -> None:
    """Run `export_tokenizer` in a dedicated process without importing torch."""
    resolve_source(parameters.tokenizer, Store(address), cache)
    if "torch" not in sys.modules:
        # Tokenizers do not need torch, and importing transformers takes twice as long with it.
        sys.modules["torch"] = None  # type: ignore[assignment]  # makes importing it fail
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # it would warn that torch is missing
    export_tokenizer(parameters, address, cache, folder)


def write_tokenizer_files(
    tokenizer: Any, folder: Path, parameters: TokenizeParameters, rendering: Rendering = CURRENT_RENDERING
) -> None:
    """Write the two files of a loaded tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    special = dict(tokenizer.special_tokens_map)
    frozen = FrozenTokenizer(
        template=tokenizer.chat_template,
        around=find_question_frame(tokenizer.chat_template, special, parameters, rendering),
        special=special,
        eos=tokenizer.eos_token_id,
        padding=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        fingerprint=fingerprint_tokenizer(tokenizer),
        rendering=rendering,
    )
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    with atomic_path(folder / TOKENIZER_FILE) as part:
        part.write_text(backend.to_str(), encoding="utf-8")
    with atomic_path(folder / FROZEN_FILE) as part:
        part.write_bytes(canonical_json(frozen.model_dump(mode="json")))


def find_question_frame(
    templates: Templates, special: Mapping[str, Any], parameters: TokenizeParameters, rendering: Rendering
) -> tuple[str, str] | None:
    """Return the constants around a question.

    Problems of a template are reported with the first record that needs it.
    """
    try:
        return make_chat_template(templates, special, parameters, None, rendering).question_frame()
    except (BadConfiguration, UnfitRecord):
        return None


def resolve_source(reference: str, store: Store, cache: Path) -> str:
    """Return what transformers loads a tokenizer from; fetches the base model of a recipe."""
    if recipe := find_recipe(reference):
        base = base_model.resolve_base_model(recipe.base_model, store, cache)
        return str(store.fetch(base, cache))
    folder = parse_folder(reference)
    if folder is None:
        return reference
    if not folder.is_dir():
        raise BadConfiguration(f"tokenize.tokenizer: there is no folder {folder}")
    return str(folder)


def load_tokenizer(reference: str, source: str) -> Any:
    """Load a tokenizer from `source` with transformers; `reference` is its name for users."""
    # Imported here: every worker imports this module, and must not load transformers.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise BadConfiguration(
            f"tokenize.tokenizer: '{reference}' can't be loaded: use a name on the model hub, file:///FOLDER, or "
            f"recipe:NAME for that recipe's base model ({reason})"
        ) from None
    if not tokenizer.is_fast:
        raise BadConfiguration(f"tokenize.tokenizer: '{reference}' has no fast implementation (no tokenizer.json)")
    if tokenizer.eos_token_id is None:
        raise BadConfiguration(f"tokenize.tokenizer: '{reference}' has no end token, which teaches a model to stop")
    return tokenizer


def fingerprint_tokenizer(tokenizer: Any) -> str:
    """Return the SHA-256 of everything that affects how records become tokens."""
    backend = tokenizer.backend_tokenizer
    decides = {
        "vocabulary": hashlib.sha256(canonical_json(tokenizer.get_vocab())).hexdigest(),
        "normalizer": repr(backend.normalizer),
        "pre_tokenizer": repr(backend.pre_tokenizer),
        "post_processor": repr(backend.post_processor),
        "template": tokenizer.chat_template,
        "eos": tokenizer.eos_token_id,
    }
    return hashlib.sha256(canonical_json(decides)).hexdigest()
