"""Shapes of models and rows, and the work description for each tool. No heavy imports."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

LORA_RANK, LORA_ALPHA = 16, 32
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LEARNING_RATE = 1e-4
MAX_GRAD_NORM = 1.0
PADDED_BATCH = 8
"""Records per padded batch: the default of transformers, with about as many useful tokens as our two packed rows."""
SAVES = 2
"""Checkpoints per run, for all trainers except the hand-written loop."""


@dataclass(frozen=True)
class Shape:
    """A Llama architecture and the shape of its training rows."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    key_value_heads: int
    tied: bool
    dtype: str
    sequence_length: int
    batch_size: int


SMALL = Shape(4096, 256, 704, 7, 8, 8, True, "float32", 512, 2)
"""6.7 million parameters: minutes on two cores."""
SEVEN_BILLION = Shape(32000, 4096, 11008, 32, 32, 32, False, "bfloat16", 2048, 4)
"""Llama-2-7B's, for a GPU."""
SHAPES = {
    "small": SMALL,
    "7b": SEVEN_BILLION,
    "7b-4096": replace(SEVEN_BILLION, sequence_length=4096, batch_size=2),
}
METHODS = ("lora", "qlora")


@dataclass(frozen=True)
class Work:
    """One epoch of work. `tokens` excludes padding; `steps` are ours, of `batch_size` rows."""

    folder: str
    tokens: int
    records: int
    steps: int
    sequence_length: int
    batch_size: int
    dtype: str
    method: str
    threads: int

    @property
    def quantization(self) -> dict[str, Any] | None:
        """The `quantization_config` for transformers: NF4 with double quantization for qlora, else None."""
        if self.method == "lora":
            return None
        return {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": self.dtype,
        }

    @property
    def model(self) -> str:
        return f"{self.folder}/model"

    def path(self, name: str) -> Path:
        return Path(self.folder) / name


def read_work(folder: str) -> Work:
    return Work(**json.loads((Path(folder) / "work.json").read_text()))
