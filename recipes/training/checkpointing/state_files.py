"""Write training state as safetensors and JSON, and read it back bit for bit."""

import json
import math
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from transformers.trainer_pt_utils import safe_globals

from recipes.training.checkpointing.safetensors_writer import write_safetensors
from recipes.training.checkpointing.staging import memory_key

# A state is what PyTorch calls a state dict: tensors in dicts, lists and tuples, with plain values. Tensors are stored in a
# safetensors file and the structure as JSON in its metadata; a state without tensors is a JSON file.
#
# Unlike a pickle, reading them cannot run code. Values are exact: Python's JSON floats round-trip, and integers may have
# any size.

STRUCTURE_KEY = "state"
"""Metadata key in a safetensors file for the state's structure as JSON."""
SAFETENSORS_SUFFIX, JSON_SUFFIX = ".safetensors", ".json"
PICKLE_SUFFIXES = (".pt", ".pth")
"""Suffixes of earlier releases, which wrote pickles under transformers' names."""


class Tag(StrEnum):
    """The single key of a JSON object that encodes a value that JSON lacks."""

    TENSOR = "$tensor"  # its name in the file
    ARRAY = "$array"  # a NumPy array, likewise
    TUPLE = "$tuple"
    ITEMS = "$items"  # a dict whose keys are not all text, as a list of pairs
    FLOAT = "$float"  # infinite or not a number


def write_state(state: Any, file: Path) -> None:
    """Write a state to a `.safetensors` file, or one without tensors to a `.json` file.

    Raises:
        TypeError: part of it is neither a tensor nor plain data.
    """
    encoder = StateEncoder()
    structure = json.dumps(encoder.encode(state, ()), allow_nan=False)
    if file.suffix == SAFETENSORS_SUFFIX:
        write_safetensors(file, encoder.tensors, {"format": "pt", STRUCTURE_KEY: structure})
    elif encoder.tensors:
        raise TypeError(f"{file.name} cannot hold tensors: {', '.join(encoder.tensors)}")
    else:
        file.write_text(structure + "\n", encoding="utf-8")


def read_state(file: Path, device: str | torch.device = "cpu") -> Any:
    """Read what `write_state` wrote.

    Pickles of earlier releases are read with PyTorch's restricted loader, which runs no code.
    """
    if file.suffix in PICKLE_SUFFIXES:
        with safe_globals():
            return torch.load(file, map_location=device, weights_only=True)
    if file.suffix == JSON_SUFFIX:
        return decode(json.loads(file.read_text(encoding="utf-8")), {})
    opened: Any = safe_open(file, framework="pt", device=str(device))
    with opened:
        structure = json.loads(opened.metadata()[STRUCTURE_KEY])
        tensors = {name: opened.get_tensor(name) for name in opened.offset_keys()}
    # CPU tensors are views of the mapped file and would keep it on disk after its checkpoint is deleted, so they are copied.
    own = {name: tensor.clone() if tensor.device.type == "cpu" else tensor for name, tensor in tensors.items()}
    return decode(structure, own)


def find_state_file(folder: Path, stem: str) -> Path:
    """Return the file in a checkpoint that holds this state.

    Raises:
        FileNotFoundError: there is none, for example because another strategy saved the checkpoint.
    """
    for suffix in (SAFETENSORS_SUFFIX, JSON_SUFFIX, *PICKLE_SUFFIXES):
        if (file := folder / f"{stem}{suffix}").is_file():
            return file
    raise FileNotFoundError(f"checkpoint {folder} has no file {stem}.*: it was saved by another distributed strategy")


class StateEncoder:
    """Encodes a state as JSON and collects its tensors by path.

    Tensors that share memory are stored once.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[tuple[object, ...], str] = {}

    def encode(self, value: Any, path: tuple[object, ...]) -> Any:
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {Tag.FLOAT: repr(float(value))}
        if isinstance(value, torch.Tensor):
            return {Tag.TENSOR: self._add(value, path)}
        if isinstance(value, np.ndarray):
            return {Tag.ARRAY: self._add(torch.from_numpy(value), path)}
        if isinstance(value, list):
            return [self.encode(item, (*path, place)) for place, item in enumerate(value)]
        if isinstance(value, tuple):
            return {Tag.TUPLE: self.encode([*value], path)}
        if isinstance(value, dict):
            items = [(key, self.encode(item, (*path, key))) for key, item in value.items()]
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return dict(items)
            return {Tag.ITEMS: [[self.encode(key, path), item] for key, item in items]}
        raise TypeError(f"{describe(path)} is a {type(value).__name__}: a checkpoint can hold tensors and plain data only")

    def _add(self, tensor: torch.Tensor, path: tuple[object, ...]) -> str:
        name = self._names.setdefault(memory_key(tensor), describe(path))
        if self.tensors.setdefault(name, tensor) is not tensor and memory_key(self.tensors[name]) != memory_key(tensor):
            raise TypeError(f"two tensors of a checkpoint are at {name}")
        return name


def describe(path: tuple[object, ...]) -> str:
    return "/".join(map(str, path)) or "state"


def decode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Rebuild a state from its JSON and tensors."""
    match value:
        case list():
            return [decode(item, tensors) for item in value]
        case {Tag.TENSOR: name}:
            return tensors[name]
        case {Tag.ARRAY: name}:
            return tensors[name].numpy()
        case {Tag.TUPLE: items}:
            return tuple(decode(items, tensors))
        case {Tag.ITEMS: items}:
            return {decode(key, tensors): decode(item, tensors) for key, item in items}
        case {Tag.FLOAT: text}:
            return float(text)
        case dict():
            return {key: decode(item, tensors) for key, item in value.items()}
    return value
