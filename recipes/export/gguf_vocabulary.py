"""Export a Hugging Face tokenizer as GGUF metadata: tokens, merges, pre-tokenizer, chat templates.

Only tokenizers that llama.cpp implements exactly are accepted, others are rejected by name: a model that is served with
other tokens than it was trained with silently gives worse answers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, TokenType

from recipes.contracts.job import BadConfiguration
from recipes.export.chat_templates import (
    add_training_values,
    check_served,
    read_chat_templates,
    write_chat_templates,
)
from recipes.export.model_json import read_json

CASELESS_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLIT_PATTERNS = {
    CASELESS_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + LLAMA3_TAIL: "llama-bpe",
    CASELESS_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + LLAMA3_TAIL: "qwen2",
}
"""Regular expressions of `Split` pre-tokenizers, by llama.cpp's names for them."""


@dataclass(frozen=True)
class Vocabulary:
    """Vocabulary of a byte-level BPE tokenizer; `tokens` has one entry per row of the embedding."""

    tokens: tuple[str, ...]
    types: tuple[TokenType, ...]
    merges: tuple[str, ...]
    pre_tokenizer: str
    special_ids: dict[str, int]
    add_bos: bool
    add_eos: bool
    chat_templates: Mapping[str, str]

    def write(self, writer: GGUFWriter) -> None:
        """Add this vocabulary to the metadata of a GGUF file."""
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self.pre_tokenizer)
        writer.add_token_list(list(self.tokens))
        writer.add_token_types(list(self.types))
        writer.add_token_merges(list(self.merges))
        adders = {
            "bos": writer.add_bos_token_id,
            "eos": writer.add_eos_token_id,
            "unk": writer.add_unk_token_id,
            "pad": writer.add_pad_token_id,
        }
        for role, token_id in self.special_ids.items():
            adders[role](token_id)
        writer.add_add_bos_token(self.add_bos)
        writer.add_add_eos_token(self.add_eos)
        writer.add_add_space_prefix(False)
        write_chat_templates(writer, self.chat_templates)


def read_vocabulary(
    model_dir: Path, rows: int, system_prompt: str | None = None, template_arguments: Mapping[str, Any] | None = None
) -> Vocabulary:
    """Read the tokenizer of a Hugging Face folder whose embedding has `rows` rows.

    Args:
        system_prompt: training's default system prompt.
        template_arguments: training's variables of the chat template.

    Raises:
        BadConfiguration: there is no tokenizer.json, it is no byte-level BPE, it has more tokens than rows, or the engine
            renders none of its templates.
    """
    templates = read_chat_templates(model_dir)
    check_served(templates, model_dir)
    document = read_json(model_dir / "tokenizer.json")
    model = document["model"]
    pre_tokenizer = require_byte_level_bpe(document, model_dir)
    tokens: list[str | None] = [None] * rows
    types = [TokenType.UNUSED] * rows
    added = {token["id"]: token for token in document.get("added_tokens", [])}
    ids: dict[str, int] = {**model["vocab"], **{token["content"]: number for number, token in added.items()}}
    if max(ids.values()) >= rows:
        raise BadConfiguration(
            f"{model_dir}: the tokenizer has ids up to {max(ids.values())} and the embedding {rows} rows: "
            "resize the model's embedding, or use the tokenizer it was trained with"
        )
    for content, number in ids.items():
        tokens[number] = content
        types[number] = TokenType.NORMAL
    for number, token in added.items():
        types[number] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
    special_ids = read_special_token_ids(model_dir, ids)
    first, last = read_template_ends(document.get("post_processor"))
    return Vocabulary(
        tokens=tuple(f"[PAD{i}]" if token is None else token for i, token in enumerate(tokens)),
        types=tuple(types),
        merges=tuple(merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]),
        pre_tokenizer=pre_tokenizer,
        special_ids=special_ids,
        add_bos=first is not None and ids.get(first) == special_ids.get("bos"),
        add_eos=last is not None and ids.get(last) == special_ids.get("eos"),
        chat_templates=add_training_values(templates, system_prompt, template_arguments or {}),
    )


def require_byte_level_bpe(document: dict[str, Any], model_dir: Path) -> str:
    """Return llama.cpp's name for the pre-tokenizer of a byte-level BPE."""
    model = document["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        kind = "SentencePiece-style BPE" if model["type"] == "BPE" else model["type"]
        raise BadConfiguration(f"{model_dir}: GGUF export supports byte-level BPE tokenizers, this one is {kind}")
    if document.get("normalizer") is not None:
        raise BadConfiguration(f"{model_dir}: GGUF export does not support the normalizer {document['normalizer']['type']}")
    name = find_pre_tokenizer_name(document.get("pre_tokenizer"))
    # With exactly this pre-tokenizer, llama.cpp looks up whole words before merging.
    if name is None or bool(model.get("ignore_merges")) != (name == "llama-bpe"):
        raise BadConfiguration(
            f"{model_dir}: llama.cpp has no name for the pre-tokenizer {json.dumps(document.get('pre_tokenizer'))} "
            f"with ignore_merges={bool(model.get('ignore_merges'))}: add it to recipes/export/gguf_vocabulary.py"
        )
    return name


def find_pre_tokenizer_name(spec: dict[str, Any] | None) -> str | None:
    """Return llama.cpp's name for a `tokenizers` pre-tokenizer, or None."""
    parts = [] if spec is None else spec["pretokenizers"] if spec["type"] == "Sequence" else [spec]
    if not parts or parts[-1]["type"] != "ByteLevel" or parts[-1].get("add_prefix_space"):
        return None
    splits_by_itself = parts[-1].get("use_regex", True)
    match parts[:-1]:
        case []:
            return "gpt-2" if splits_by_itself else None
        case [{"type": "Digits", "individual_digits": True}]:
            return "smollm" if splits_by_itself else None
        case [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}]:
            return None if splits_by_itself else SPLIT_PATTERNS.get(pattern)
    return None


def read_special_token_ids(model_dir: Path, ids: dict[str, int]) -> dict[str, int]:
    """Return ids of the tokens in tokenizer_config.json, by role."""
    config = read_json(model_dir / "tokenizer_config.json")
    found: dict[str, int] = {}
    for role in ("bos", "eos", "unk", "pad"):
        named = config.get(f"{role}_token")
        content = named["content"] if isinstance(named, dict) else named
        if content is not None:
            if content not in ids:
                raise BadConfiguration(f"{model_dir}: {role}_token {content!r} is not in the tokenizer's vocabulary")
            found[role] = ids[content]
    return found


def read_template_ends(post_processor: dict[str, Any] | None) -> tuple[str | None, str | None]:
    """Return the special tokens that the post-processor adds before and after a text."""
    if post_processor is None:
        return None, None
    for part in post_processor.get("processors", [post_processor]):
        if part["type"] == "TemplateProcessing" and part["single"]:
            first, last = part["single"][0], part["single"][-1]
            return first.get("SpecialToken", {}).get("id"), last.get("SpecialToken", {}).get("id")
    return None, None
