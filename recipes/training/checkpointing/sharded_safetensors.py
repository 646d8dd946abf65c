"""A whole model's files from the rows of a sharded checkpoint, a piece at a time: nobody ever holds all weights.

Byte for byte what transformers would have saved of that model: a digest says what was trained, not on how many processes.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from transformers import PreTrainedModel
from transformers.core_model_loading import dot_natural_key

from recipes.training.row_files import RowFiles

LARGEST = "50GB"
"""Of one file, as `save_pretrained` has it."""
INDEX = "model.safetensors.index.json"
TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
ALIGNMENT = 8


def write_whole(rows: RowFiles, model: PreTrainedModel, folder: Path, largest: str = LARGEST) -> None:
    """The weights of `model`, which needs no bytes itself (the meta device), in the type that it has."""
    named = dict(model.named_parameters())  # each tied one once, as it is saved
    weights = {name: named[name] for name in sorted(named, key=dot_natural_key)}
    split = split_torch_state_dict_into_shards(weights, filename_pattern="model{suffix}.safetensors", max_shard_size=largest)
    for name, held in split.filename_to_tensors.items():
        write_file({weight: weights[weight] for weight in held}, rows, folder / name)
    if split.is_sharded:
        metadata = {"total_parameters": model.num_parameters(), **split.metadata}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def write_file(weights: Mapping[str, torch.Tensor], rows: RowFiles, file: Path) -> None:
    """A safetensors file: the length of its header, the header, then the bytes of one tensor after the other."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(weights):
        begin, end = end, end + weights[name].nbytes
        shape, dtype = list(weights[name].shape), TYPES[weights[name].dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    words = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    words += b" " * (-len(words) % ALIGNMENT)
    with file.open("wb") as target:
        target.write(len(words).to_bytes(8, "little") + words)
        for name in sorted(weights):
            for piece in rows.pieces(name):
                target.write(bytes_of(piece.to(weights[name].dtype)))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data
