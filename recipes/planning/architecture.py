"""Shapes of decoder-only transformers and their parameter counts. Pure, without loading a model.

Covers families whose layers are q, k, v, o, gate, up and down projections with RMS norms: Llama, Mistral, Qwen2, Qwen3.
Names are those of a Hugging Face `config.json`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from recipes.contracts.frozen_model import YamlModel
from recipes.contracts.job import MAX_COUNT, BadConfiguration
from recipes.contracts.validation_errors import explain_first_error

BIASED_PROJECTIONS = {"qwen2": ("q_proj", "k_proj", "v_proj")}
"""Projections with a bias, by family (`modeling_qwen2.py` of transformers; the others have none by default)."""
ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
HEAD_NORM_FAMILIES = ("qwen3",)
"""Families that normalize queries and keys per head."""
FIXED_HEAD_DIMS = {"qwen3": 128}
"""Head size of families in which it is independent of the hidden size (`Qwen3Config.head_dim`)."""


@dataclass(frozen=True)
class TensorGroup:
    """`copies` tensors of `elements` elements; `projection` marks linear layers of a block."""

    name: str
    elements: int
    copies: int = 1
    projection: bool = False

    @property
    def total(self) -> int:
        return self.elements * self.copies


class Architecture(YamlModel):
    """Shape of a model. Sizes are numbers of elements."""

    model_type: Literal["llama", "mistral", "qwen2", "qwen3"]
    hidden_size: int = Field(ge=1, le=MAX_COUNT)
    num_hidden_layers: int = Field(ge=1, le=MAX_COUNT)
    num_attention_heads: int = Field(ge=1, le=MAX_COUNT)
    num_key_value_heads: int = Field(ge=1, le=MAX_COUNT)
    head_dim: int | None = Field(None, ge=1, le=MAX_COUNT, description="default: 128 for qwen3, else hidden_size / heads")
    intermediate_size: int = Field(ge=1, le=MAX_COUNT)
    vocab_size: int = Field(ge=1, le=MAX_COUNT)
    tie_word_embeddings: bool = False
    # Omitted if unset, so that digests of recipes from before this key stay the same.
    max_position_embeddings: int | None = Field(
        None, ge=1, exclude_if=lambda value: value is None, description="maximum tokens of a text; unknown if unset"
    )

    @model_validator(mode="after")
    def validate_heads(self) -> Self:
        if self.head_dim is None and self.model_type not in FIXED_HEAD_DIMS and self.hidden_size % self.num_attention_heads:
            raise ValueError("hidden_size is not a multiple of num_attention_heads: set head_dim")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads is not a multiple of num_key_value_heads")
        return self

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read the shape from a `config.json`.

        Raises:
            BadConfiguration: unsupported family, unsupported biases, or a missing number.
        """
        stated = {key: config[key] for key in cls.model_fields if config.get(key) is not None}
        stated.setdefault("num_key_value_heads", stated.get("num_attention_heads"))
        if config.get("attention_bias") or config.get("mlp_bias"):
            raise BadConfiguration("an architecture with attention_bias or mlp_bias is not supported")
        try:
            return cls.model_validate(stated)
        except ValidationError as error:
            raise BadConfiguration(f"architecture: {explain_first_error(error, cls)}") from None

    @property
    def head_size(self) -> int:
        return self.head_dim or FIXED_HEAD_DIMS.get(self.model_type) or self.hidden_size // self.num_attention_heads

    @property
    def query_width(self) -> int:
        return self.num_attention_heads * self.head_size

    @property
    def key_value_width(self) -> int:
        return self.num_key_value_heads * self.head_size

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """Input and output features of each linear layer in a block, by name."""
        hidden, query, key_value, inner = self.hidden_size, self.query_width, self.key_value_width, self.intermediate_size
        return {
            "q_proj": (hidden, query),
            "k_proj": (hidden, key_value),
            "v_proj": (hidden, key_value),
            "o_proj": (query, hidden),
            "gate_proj": (hidden, inner),
            "up_proj": (hidden, inner),
            "down_proj": (inner, hidden),
        }

    @property
    def block_tensors(self) -> tuple[TensorGroup, ...]:
        """The parameters of a block."""
        biased = BIASED_PROJECTIONS.get(self.model_type, ())
        norms = 2 if self.model_type in HEAD_NORM_FAMILIES else 0
        return (
            *(TensorGroup(name, into * out, projection=True) for name, (into, out) in self.projections.items()),
            *(TensorGroup(f"{name}.bias", self.projections[name][1]) for name in biased),
            TensorGroup("layernorm", self.hidden_size, 2),
            *((TensorGroup("head_norm", self.head_size, norms),) if norms else ()),
        )

    @property
    def root_tensors(self) -> tuple[TensorGroup, ...]:
        """The parameters outside of blocks; a tied head shares the embedding's."""
        embedding = TensorGroup("embed_tokens", self.vocab_size * self.hidden_size, 1 if self.tie_word_embeddings else 2)
        return (embedding, TensorGroup("norm", self.hidden_size))

    @property
    def tensors(self) -> tuple[TensorGroup, ...]:
        """All parameters."""
        layers = self.num_hidden_layers
        blocks = (TensorGroup(t.name, t.elements, t.copies * layers, t.projection) for t in self.block_tensors)
        return (*self.root_tensors, *blocks)

    @property
    def parameters(self) -> int:
        return sum(tensors.total for tensors in self.tensors)

    def tensor_parallel_part(self, processes: int) -> Self:
        """Return the shape of one process's part with tensor parallelism (`distributed.tensor_parallel`).

        Heads, intermediate size and vocabulary are divided; norms are replicated.
        """
        shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
        parts = {name: -(-getattr(self, name) // processes) for name in shared}
        return self.model_copy(update=parts | {"head_dim": self.head_size})

    @property
    def modules(self) -> Iterator[str]:
        """Names of the modules that an adapter can target: linear layers, and the embedding."""
        yield "model.embed_tokens"
        yield "lm_head"
        for layer in range(self.num_hidden_layers):
            for name in self.projections:
                yield f"model.layers.{layer}.{'self_attn' if name in ATTENTION_PROJECTIONS else 'mlp'}.{name}"

    def adapter(self, rank: int, targets: tuple[str, ...]) -> tuple[TensorGroup, ...]:
        """Return the parameters of a LoRA adapter.

        A [rank, in] and B [out, rank] per target (Hu et al. 2021, section 4.1).

        Raises:
            BadConfiguration: a target is no projection of this architecture.
        """
        found = []
        for target in targets:
            if target not in self.projections:
                known = ", ".join(self.projections)
                raise BadConfiguration(f"lora_target_modules: there is no '{target}' in this model: use some of {known}")
            into, out = self.projections[target]
            found += [TensorGroup(f"{target}.lora_A", rank * into, self.num_hidden_layers)]
            found += [TensorGroup(f"{target}.lora_B", rank * out, self.num_hidden_layers)]
        return tuple(found)
