"""The GGUF export against llama.cpp itself: equal tokens and distribution, reproducible bytes."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import TokenType
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.contracts.job import BadConfiguration
from recipes.export.gguf import Quantization, export_gguf
from recipes.export.gguf_vocabulary import find_pre_tokenizer_name, read_vocabulary
from tests.recipes.llama_cpp import LlamaCpp
from tests.recipes.tiny_model import SPECIAL, make_tiny_model

TEXT = "The harbour is called 1947 <|im_end|> we're counting  ships\n\n in Ellarin: größer 船"
LARGEST_DIVERGENCE: dict[Quantization, float] = {"F16": 1e-4, "BF16": 1e-3, "Q8_0": 3e-2}
"""Of the next token's distribution. The tiny model's weights are larger, so more sensitive, than a trained model's."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def changed(model_dir: Path, target: Path, **changes: Any) -> Path:
    """Return a copy of the model with changed keys in config.json."""
    shutil.copytree(model_dir, target)
    config = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config))
    return target


def expected_logprobs(folder: Path, tokens: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0, -1], -1)


def divergence(folder: Path, gguf: Path) -> float:
    """Return the KL divergence of llama.cpp's next-token distribution from that of transformers."""
    tokens = AutoTokenizer.from_pretrained(folder)(TEXT).input_ids
    expected = expected_logprobs(folder, tokens)
    found = LlamaCpp(gguf).next_logprobs(tokens, len(expected))
    assert len(found) == len(expected)
    measured = torch.tensor([found[token] for token in range(len(expected))])
    return float((expected.exp() * (expected - measured)).sum())


@pytest.mark.requirement("N5")
@pytest.mark.parametrize("quantization", ["F16", "BF16", "Q8_0"])
def test_llama_cpp_distribution_matches_transformers(model_dir: Path, tmp_path: Path, quantization: Quantization) -> None:
    export_gguf(model_dir, tmp_path / "model.gguf", quantization)
    assert divergence(model_dir, tmp_path / "model.gguf") < LARGEST_DIVERGENCE[quantization]


def test_f16_continues_a_text_as_transformers_does(model_dir: Path, tmp_path: Path) -> None:
    export_gguf(model_dir, tmp_path / "model.gguf", "F16")
    tokens = AutoTokenizer.from_pretrained(model_dir)(TEXT).input_ids
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    generated = model.generate(torch.tensor([tokens]), max_new_tokens=12, do_sample=False)[0, len(tokens) :]
    assert LlamaCpp(tmp_path / "model.gguf").continuation(tokens, 12) == generated.tolist()


def test_tokens_and_chat_template_match_transformers(model_dir: Path, tmp_path: Path) -> None:
    export_gguf(model_dir, tmp_path / "model.gguf", "Q8_0")
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    server = LlamaCpp(tmp_path / "model.gguf")
    assert server.tokenize(TEXT) == tokenizer(TEXT).input_ids
    messages = [{"role": "user", "content": TEXT}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert server.render(messages) == rendered


@pytest.mark.requirement("N4", "Z27")
def test_equal_input_gives_equal_bytes(model_dir: Path, tmp_path: Path) -> None:
    elsewhere = shutil.copytree(model_dir, tmp_path / "a copy at another path")
    for folder, name in ((model_dir, "a.gguf"), (elsewhere, "b.gguf")):
        export_gguf(folder, tmp_path / name, "Q8_0")
    digests = {hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in ("a.gguf", "b.gguf")}
    assert len(digests) == 1
    assert not list(tmp_path.glob("*.part"))


def test_llama3_rope_scaling_matches_transformers(model_dir: Path, tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 50_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    folder = changed(model_dir, tmp_path / "other", rope_parameters=rope)
    export_gguf(folder, tmp_path / "model.gguf", "F16")
    assert divergence(folder, tmp_path / "model.gguf") < LARGEST_DIVERGENCE["F16"]


def test_untied_embeddings_and_unaligned_rows_match_transformers(model_dir: Path, tmp_path: Path) -> None:
    folder = changed(model_dir, tmp_path / "other", tie_word_embeddings=False, intermediate_size=80)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if "gate_proj" in name or "up_proj" in name:
            weights[name] = tensor[:80].contiguous()
        elif "down_proj" in name:
            weights[name] = tensor[:, :80].contiguous()  # 80 is not a multiple of 32: this tensor falls back to F16
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].roll(7, 0)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    export_gguf(folder, tmp_path / "model.gguf", "Q8_0")
    assert divergence(folder, tmp_path / "model.gguf") < LARGEST_DIVERGENCE["Q8_0"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "supports LlamaForCausalLM"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "not yarn"),
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight is missing"),
        ({"num_hidden_layers": 1}, "does not know the tensor model.layers.1"),
    ],
)
def test_model_that_llama_cpp_would_compute_differently_is_refused(
    model_dir: Path, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    folder = changed(model_dir, tmp_path / "other", **changes)
    with pytest.raises(BadConfiguration, match=reason) as refusal:
        export_gguf(folder, tmp_path / "model.gguf", "F16")
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "model.gguf").exists()


def test_an_unknown_tokenizer_is_refused(model_dir: Path, tmp_path: Path) -> None:
    folder = changed(model_dir, tmp_path / "other")
    document = json.loads((folder / "tokenizer.json").read_text())
    document["pre_tokenizer"] = {"type": "Whitespace"}
    (folder / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(BadConfiguration, match="no name for the pre-tokenizer"):
        export_gguf(folder, tmp_path / "model.gguf", "F16")


def test_weights_that_overflow_are_refused(model_dir: Path, tmp_path: Path) -> None:
    folder = changed(model_dir, tmp_path / "other")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e6
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadConfiguration, match="not finite as F16: export it as BF16 or Q8_0"):
        export_gguf(folder, tmp_path / "model.gguf", "F16")
    assert not (tmp_path / "model.gguf").exists()


def test_special_tokens_are_control_tokens(model_dir: Path) -> None:
    vocabulary = read_vocabulary(model_dir, rows=403)
    control = [token for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == TokenType.CONTROL]
    assert control == SPECIAL
    assert vocabulary.tokens[400:] == ("[PAD400]", "[PAD401]", "[PAD402]")
    assert set(vocabulary.types[400:]) == {TokenType.UNUSED}
    assert vocabulary.special_ids == {"bos": 1, "eos": 2, "unk": 0, "pad": 2}
    assert not vocabulary.add_bos


def test_a_post_processor_that_adds_bos_is_kept(model_dir: Path, tmp_path: Path) -> None:
    folder = changed(model_dir, tmp_path / "other")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    export_gguf(folder, tmp_path / "model.gguf", "F16")
    assert LlamaCpp(tmp_path / "model.gguf").tokenize(TEXT) == tokenizer.encode(TEXT).ids


def test_a_tokenizer_larger_than_the_embedding_is_refused(model_dir: Path) -> None:
    with pytest.raises(BadConfiguration, match="ids up to 399 and the embedding 399 rows"):
        read_vocabulary(model_dir, rows=399)


def test_pre_tokenizers_map_to_llama_cpp_names() -> None:
    digits = {"type": "Digits", "individual_digits": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    assert find_pre_tokenizer_name(byte_level) == "gpt-2"
    assert find_pre_tokenizer_name({"type": "Sequence", "pretokenizers": [digits, byte_level]}) == "smollm"
    assert find_pre_tokenizer_name({**byte_level, "add_prefix_space": True}) is None
    assert find_pre_tokenizer_name(None) is None
