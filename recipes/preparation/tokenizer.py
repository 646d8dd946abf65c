"""From the name of a tokenizer to the files that the workers need, taken out of transformers once.

The library takes seconds and 250 MB to load a tokenizer, because it loads torch; every worker would pay that.
"""

import hashlib
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from recipes.parameters import TokenizeParameters
from recipes.preparation.plan import written
from recipes.preparation.tokenizer_files import FROZEN, TOKENIZER, FrozenTokenizer
from recipes.recipe import Recipe
from recipes.schema import BadConfiguration, StoreAddress, canonical_json
from recipes.store import Store


def freeze(parameters: TokenizeParameters, address: StoreAddress, cache: Path, folder: Path) -> None:
    """Write a tokenizer's two files into `folder`, if they are not there.

    Raises:
        BadConfiguration: there is no such tokenizer, or it has no fast implementation or no end token.
    """
    if (folder / FROZEN).is_file():
        return
    write_frozen(load(parameters.tokenizer, Store(address), cache), folder)


def write_frozen(tokenizer: Any, folder: Path) -> None:
    """The two files of a tokenizer that was loaded."""
    folder.mkdir(parents=True, exist_ok=True)
    frozen = FrozenTokenizer(
        template=tokenizer.chat_template,
        special=dict(tokenizer.special_tokens_map),
        eos=tokenizer.eos_token_id,
        padding=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        fingerprint=fingerprint(tokenizer),
    )
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    with written(folder / TOKENIZER) as part:
        part.write_text(backend.to_str(), encoding="utf-8")
    with written(folder / FROZEN) as part:
        part.write_bytes(canonical_json(frozen.model_dump(mode="json")))


def load(reference: str, store: Store, cache: Path) -> Any:
    """A tokenizer by its reference, as transformers has it."""
    # Here, not above: every worker imports the file that names this function, and must not load torch for that.
    from transformers import AutoTokenizer

    if reference.startswith("recipe:"):
        from recipes import base_model  # loads what models need, which takes longer than the tokenizer

        base = base_model.resolve(Recipe.named(reference.removeprefix("recipe:")).base_model, store, cache)
        source = str(store.fetch(base, cache))
    elif reference.startswith("file://"):
        source = unquote(urlparse(reference).path)
        if not Path(source).is_dir():
            raise BadConfiguration(f"tokenize.tokenizer: there is no folder {source}")
    else:
        source = reference
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


def fingerprint(tokenizer: Any) -> str:
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
