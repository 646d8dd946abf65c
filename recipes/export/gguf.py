"""Export a Hugging Face Llama folder as a GGUF file."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, Keys, LlamaFileType, quantize
from gguf.quants import quant_shape_to_byte_shape
from safetensors import safe_open

from recipes.contracts.job import BadConfiguration
from recipes.export.gguf_vocabulary import read_vocabulary
from recipes.export.model_json import read_json

# A Llama configuration as GGUF metadata.


@dataclass(frozen=True)
class GgufArchitecture:
    """The values of a Llama configuration that a GGUF file contains."""

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
        """Read a configuration.

        Raises BadConfiguration for features that llama.cpp's `llama` graph lacks.
        """
        if config.get("architectures") != ["LlamaForCausalLM"]:
            raise BadConfiguration(
                f"{model_dir}: GGUF export supports LlamaForCausalLM, this folder is {config.get('architectures')}"
            )
        if config.get("hidden_act", "silu") != "silu":
            raise BadConfiguration(f"{model_dir}: GGUF export supports hidden_act silu, not {config['hidden_act']}")
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
        kind = rope.setdefault("rope_type", rope.pop("type", "default"))
        if kind not in ("default", "llama3"):
            raise BadConfiguration(f"{model_dir}: GGUF export supports rope types default and llama3, not {kind}")
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
        """Return Llama 3.1's frequency factors, or None for plain rotary embeddings."""
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


# Write a Hugging Face folder of the Llama architecture as a GGUF file, tensor by tensor.
#
# Deterministic: equal folders give equal bytes, so that nothing of the machine, the time or the path is written. The
# tokenizer is read in `recipes.export.gguf_vocabulary`; adapters are merged in `recipes.export.merge`.

Quantization = Literal["F16", "BF16", "Q8_0"]
FILE_TYPES = {
    "F16": LlamaFileType.MOSTLY_F16,
    "BF16": LlamaFileType.MOSTLY_BF16,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
}
Q8_0_BLOCK = 32
BLOCK_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True)
class GgufTensor:
    """A tensor to write: its source and conversion."""

    target: str
    source: str
    file: Path
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    permuted_heads: int | None

    @property
    def byte_shape(self) -> tuple[int, ...]:
        return tuple(quant_shape_to_byte_shape(self.shape, self.kind))

    def load(self) -> np.ndarray[Any, Any]:
        """Read and encode the tensor.

        Called late, so that one tensor at a time is in memory.
        """
        with safe_open(self.file, framework="pt") as tensors:
            values = tensors.get_tensor(self.source).to(torch.float32).numpy()
        if self.permuted_heads is not None:
            values = interleave_rotary(values, self.permuted_heads)
        with np.errstate(over="ignore"):  # checked below
            encoded: np.ndarray[Any, Any] = quantize(np.ascontiguousarray(values), self.kind)
        overflow = self.kind == GGMLQuantizationType.F16 and not np.isfinite(encoded).all()
        if overflow or not np.isfinite(values).all():
            hint = "export it as BF16 or Q8_0" if overflow and np.isfinite(values).all() else "train or merge it again"
            raise BadConfiguration(f"{self.file}: {self.source} has values that are not finite as {self.kind.name}: {hint}")
        return encoded


def export_gguf(
    model_dir: Path,
    out: Path,
    quantization: Quantization,
    system_prompt: str | None = None,
    template_arguments: Mapping[str, Any] | None = None,
) -> None:
    """Write the model in `model_dir` to `out`, atomically.

    Args:
        system_prompt: training's default system prompt, added to the file's templates.
        template_arguments: training's variables of the chat template, added to the file's templates.

    Raises:
        BadConfiguration: llama.cpp would not compute the architecture, tokenizer or a tensor as transformers does.
    """
    architecture = GgufArchitecture.read(read_json(model_dir / "config.json"), model_dir)
    weights = plan_tensors(model_dir, architecture, GGMLQuantizationType[quantization])
    vocabulary = read_vocabulary(model_dir, weights[0].shape[0], system_prompt, template_arguments)
    part = out.with_name(out.name + ".part")
    out.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(part, "llama")
    writer.add_file_type(FILE_TYPES[quantization])
    writer.add_quantization_version(2)
    writer.add_vocab_size(len(vocabulary.tokens))
    architecture.write(writer)
    vocabulary.write(writer)
    factors = architecture.rope_factors()
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    for weight in weights:
        size = math.prod(weight.byte_shape)
        writer.add_tensor_info(weight.target, weight.byte_shape, np.dtype(np.uint8), size, raw_dtype=weight.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if factors is not None:
        writer.write_tensor_data(factors)
    for weight in weights:
        writer.write_tensor_data(weight.load())
    writer.close()
    part.replace(out)


PROBE_SHAPE = GgufArchitecture(
    layers=1,
    hidden=32,
    intermediate=32,
    heads=1,
    kv_heads=1,
    head_dim=32,
    context=512,
    rms_eps=1e-5,
    rope={"rope_theta": 10000.0, "rope_type": "default"},
    tied=True,
)
"""The smallest model that llama.cpp loads."""


def write_probe_gguf(gguf: Path, out: Path) -> None:
    """Write a tiny dummy model with the vocabulary of another.

    The vocabulary alone determines how the engine tokenizes and renders texts.
    """
    fields = [field for name, field in GGUFReader(gguf).fields.items() if name.startswith("tokenizer.")]
    rows = next(len(field.data) for field in fields if field.name == Keys.Tokenizer.LIST)
    writer = GGUFWriter(out, "llama")
    writer.add_file_type(FILE_TYPES["F16"])
    writer.add_vocab_size(rows)
    PROBE_SHAPE.write(writer)
    for field in fields:
        writer.add_key_value(field.name, field.contents(), field.types[0], field.types[-1])
    hidden = PROBE_SHAPE.hidden
    for name, _, _ in list_tensor_names(PROBE_SHAPE):
        if name.endswith("_norm.weight"):
            writer.add_tensor(name, np.ones(hidden, np.float32))
        elif name.endswith(".weight"):
            writer.add_tensor(name, np.zeros((rows if name == "token_embd.weight" else hidden, hidden), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def plan_tensors(model_dir: Path, architecture: GgufArchitecture, default_kind: GGMLQuantizationType) -> list[GgufTensor]:
    """Every tensor in the order of the GGUF file, the embedding first.

    A tensor left over is an error.
    """
    sources = dict(read_tensor_headers(model_dir))
    weights = []
    for target, source, heads in list_tensor_names(architecture):
        if source not in sources:
            if source.endswith(".bias"):
                continue
            raise BadConfiguration(f"{model_dir}: the tensor {source} is missing: save the whole model again")
        file, shape = sources.pop(source)
        kind = default_kind
        if len(shape) == 1:
            kind = GGMLQuantizationType.F32
        elif default_kind == GGMLQuantizationType.Q8_0 and shape[-1] % Q8_0_BLOCK:
            kind = GGMLQuantizationType.F16
        weights.append(GgufTensor(target, source, file, shape, kind, heads))
    computed = {"lm_head.weight"} if architecture.tied else set()
    leftover = sorted(name for name in sources if name not in computed and not name.endswith("rotary_emb.inv_freq"))
    if leftover:
        raise BadConfiguration(f"{model_dir}: GGUF export does not know the tensor {leftover[0]}")
    return weights


def list_tensor_names(architecture: GgufArchitecture) -> Iterator[tuple[str, str, int | None]]:
    """GGUF name, Hugging Face name and, for query and key, the heads to interleave."""
    yield "token_embd.weight", "model.embed_tokens.weight", None
    heads = {"attn_q": architecture.heads, "attn_k": architecture.kv_heads}
    for layer in range(architecture.layers):
        for source, target in BLOCK_TENSORS.items():
            for part in ("weight",) if target.endswith("_norm") else ("weight", "bias"):
                yield f"blk.{layer}.{target}.{part}", f"model.layers.{layer}.{source}.{part}", heads.get(target)
    yield "output_norm.weight", "model.norm.weight", None
    if not architecture.tied:
        yield "output.weight", "lm_head.weight", None


def read_tensor_headers(model_dir: Path) -> Iterator[tuple[str, tuple[Path, tuple[int, ...]]]]:
    """Name, file and shape of every tensor of a folder, from the headers alone."""
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise BadConfiguration(f"{model_dir} holds no .safetensors file: save the model with save_pretrained")
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in sorted(tensors.keys()):
                yield name, (file, tuple(tensors.get_slice(name).get_shape()))


def interleave_rotary(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """llama.cpp rotates neighbouring pairs, transformers the two halves of a head.

    Reorder the rows between them.
    """
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)
