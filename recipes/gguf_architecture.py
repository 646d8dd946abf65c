"""The configuration of a Llama model as GGUF metadata. Tensors are `recipes.export.gguf`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from gguf import GGUFWriter

from recipes.contracts.job import BadConfiguration


@dataclass(frozen=True)
class Architecture:
    """The numbers of a Llama configuration that a GGUF file carries."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    rms_eps: float
    rope: dict[str, Any]
    tied: bool

    @classmethod
    def read(cls, config: dict[str, Any], model_dir: Path) -> Self:
        """Raises BadConfiguration for what llama.cpp's `llama` graph does not compute."""
        if config.get("architectures") != ["LlamaForCausalLM"]:
            raise BadConfiguration(
                f"{model_dir}: GGUF export knows LlamaForCausalLM, this folder is {config.get('architectures')}"
            )
        if config.get("hidden_act", "silu") != "silu":
            raise BadConfiguration(f"{model_dir}: GGUF export knows hidden_act silu, not {config['hidden_act']}")
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
        kind = rope.setdefault("rope_type", rope.pop("type", "default"))
        if kind not in ("default", "llama3"):
            raise BadConfiguration(f"{model_dir}: GGUF export knows rope types default and llama3, not {kind}")
        heads = config["num_attention_heads"]
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            context=config["max_position_embeddings"],
            rms_eps=config["rms_norm_eps"],
            rope=rope,
            tied=config.get("tie_word_embeddings", False),
        )

    def write(self, writer: GGUFWriter) -> None:
        writer.add_block_count(self.layers)
        writer.add_context_length(self.context)
        writer.add_embedding_length(self.hidden)
        writer.add_feed_forward_length(self.intermediate)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.kv_heads)
        writer.add_key_length(self.head_dim)
        writer.add_value_length(self.head_dim)
        writer.add_rope_dimension_count(self.head_dim)
        writer.add_rope_freq_base(self.rope["rope_theta"])
        writer.add_layer_norm_rms_eps(self.rms_eps)

    def rope_factors(self) -> np.ndarray[Any, Any] | None:
        """Llama 3.1's frequency factors, None for plain rotary embeddings."""
        rope = self.rope
        if rope["rope_type"] == "default":
            return None
        factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
        trained = rope["original_max_position_embeddings"]
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float32) / self.head_dim
        wavelengths = 2 * np.pi * np.float32(rope["rope_theta"]) ** exponents
        smooth = np.clip((trained / wavelengths - low) / (high - low), 0, 1)
        factors: np.ndarray[Any, Any] = (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
        return factors
