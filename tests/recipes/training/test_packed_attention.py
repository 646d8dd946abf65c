"""Example boundaries of packed attention, and its results, with CPU kernels.

`test_gpu` covers FlashAttention's kernels.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import AutoConfig, AutoModelForCausalLM

from recipes.training.packed_attention import (
    add_boundaries,
    example_boundaries,
    supports_packed_attention,
    use_packed_attention,
)
from tests.recipes.training import cpu_varlen_attention

TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 100,
}


@pytest.fixture
def on_a_processor() -> Iterator[None]:
    with cpu_varlen_attention.on_a_processor():
        yield


@pytest.mark.parametrize(
    ("positions", "bounds"),
    [
        ([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]], [0, 3, 5, 6, 10]),
        ([[0, 1, 2, 3]], [0, 4]),
        ([[0, 0]], [0, 1, 2]),
    ],
)
def test_example_boundaries_follow_position_restarts_and_row_ends(positions: list[list[int]], bounds: list[int]) -> None:
    found = example_boundaries(torch.tensor(positions))
    assert found.tolist() == bounds and found.dtype is torch.int32


def test_packed_attention_is_unsupported_without_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert not supports_packed_attention(AutoConfig.for_model("llama"), torch.bfloat16)


def model_of(config: dict[str, Any], *, packed: bool) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY | config), attn_implementation="sdpa")
    if packed:
        use_packed_attention(model)
    return model


def batch_of(rows: list[list[int]]) -> dict[str, Any]:
    positions = torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in rows])
    tokens = torch.randint(0, TINY["vocab_size"], positions.shape, generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens, "position_ids": positions}


def learned(model: Any, batch: dict[str, Any]) -> tuple[float, torch.Tensor]:
    """Return the loss and the gradient of the embeddings."""
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.item(), model.get_input_embeddings().weight.grad


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "num_key_value_heads": 2},
        {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 24},
        {"model_type": "qwen2"},
        {"model_type": "qwen3", "num_key_value_heads": 1},
    ],
    ids=str,
)
def test_maskless_attention_equals_masked_attention(on_a_processor: None, config: dict[str, Any]) -> None:
    batch = batch_of([[50, 14, 64], [128], [1, 1, 100, 26]])
    loss, gradient = learned(model_of(config, packed=False), batch)
    for given in (add_boundaries(batch), batch):  # a custom objective passes no boundaries
        found, found_gradient = learned(model_of(config, packed=True), given)
        assert found == pytest.approx(loss, rel=1e-6)
        assert float((found_gradient - gradient).norm() / gradient.norm()) < 1e-5


def test_rows_of_one_example_each_work_without_position_ids(on_a_processor: None) -> None:
    batch = batch_of([[20], [20]])
    del batch["position_ids"]
    loss, _ = learned(model_of({"model_type": "llama"}, packed=False), batch)
    found, _ = learned(model_of({"model_type": "llama"}, packed=True), add_boundaries(batch))
    assert found == pytest.approx(loss, rel=1e-6)


def test_compiled_block_is_reused_for_any_number_of_examples(on_a_processor: None) -> None:
    torch.compiler.reset()
    model = model_of({"model_type": "llama", "num_hidden_layers": 1}, packed=True)
    programs = CompileCounter()
    model.get_decoder().layers[0].compile(dynamic=False, backend=programs)
    for lengths in ([64], [30, 34], [1, 2, 61], [16] * 4, [8] * 8):
        model(**add_boundaries(batch_of([lengths, [64]])), use_cache=False).loss.backward()
    assert programs.frame_count == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    torch.compiler.reset()
