"""Export a Hugging Face tokenizer once, to files that workers load without transformers."""

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

# A tokenizer as the workers read it: the file of the fast implementation, and beside it what else decides.

FROZEN_FILE = "frozen.json"
TOKENIZER_FILE = "tokenizer.json"


class FrozenTokenizer(FrozenModel):
    """Chat template or several by name, special tokens by name, the ids of two, and a hash that is equal where all of it is.

    `around` are the texts that the template puts around a plain question: workers need not load it for them. `rendering` is
    how records become texts.
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


# From the name of a tokenizer to the files that the workers need, taken out of transformers once.
#
# The library takes a second to load one, and with torch three and 250 MB; every worker would pay that.


def export_tokenizer(parameters: TokenizeParameters, address: StoreAddress, cache: Path, folder: Path) -> None:
    """Write a tokenizer's two files into `folder`, if they are not there.

    Raises:
        BadConfiguration: there is no such tokenizer, or it has no fast implementation or no end token.
    """
    if not (folder / FROZEN_FILE).is_file():
        write_tokenizer_files(
            load_tokenizer(parameters.tokenizer, resolve_source(parameters.tokenizer, Store(address), cache)),
            folder,
            parameters,
        )


def export_without_torch(parameters: TokenizeParameters, address: StoreAddress, cache: Path, folder: Path) -> None:
    """`export_tokenizer` in a process that does nothing else after it."""
    resolve_source(parameters.tokenizer, Store(address), cache)
    if "torch" not in sys.modules:
        # No tokenizer needs it, and transformers takes twice as long where it finds it.
        sys.modules["torch"] = None  # type: ignore[assignment]  # which is how Python is told that there is no such module
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # it would tell the user that there is none
    export_tokenizer(parameters, address, cache, folder)


def write_tokenizer_files(
    tokenizer: Any, folder: Path, parameters: TokenizeParameters, rendering: Rendering = CURRENT_RENDERING
) -> None:
    """The two files of a tokenizer that was loaded."""
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
    """The constant texts around a question. What is wrong with a template is said of the first record that needs it."""
    try:
        return make_chat_template(templates, special, parameters, None, rendering).question_frame()
    except (BadConfiguration, UnfitRecord):
        return None


def resolve_source(reference: str, store: Store, cache: Path) -> str:
    """What transformers loads a tokenizer from; a recipe's base model is fetched for it."""
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
    """The tokenizer in `source` as transformers has it; users know it by its reference."""
    # Here, not above: every worker imports the file that names this function, and must not load it for that.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise BadConfiguration(
            f"tokenize.tokenizer: '{reference}' can't be loaded: give a name on the model hub, file:///FOLDER, or "
            f"recipe:NAME for what that recipe trains ({reason})"
        ) from None
    if not tokenizer.is_fast:
        raise BadConfiguration(f"tokenize.tokenizer: '{reference}' has no fast implementation (no tokenizer.json)")
    if tokenizer.eos_token_id is None:
        raise BadConfiguration(f"tokenize.tokenizer: '{reference}' has no end token: nothing would teach a model to stop")
    return tokenizer


def fingerprint_tokenizer(tokenizer: Any) -> str:
    """SHA-256 of what decides how a record becomes tokens."""
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
