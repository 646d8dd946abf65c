"""Where attention is told that examples end. What it computes is for a GPU to show (`test_on_a_gpu`)."""

import pytest
import torch
from transformers import AutoConfig

from recipes.training.packed_attention import bounds_of, fits


@pytest.mark.parametrize(
    ("positions", "bounds"),
    [
        ([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]], [0, 3, 5, 6, 10]),
        ([[0, 1, 2, 3]], [0, 4]),
        ([[0, 0]], [0, 1, 2]),
    ],
)
def test_examples_end_where_positions_begin_anew_and_with_their_row(positions: list[list[int]], bounds: list[int]) -> None:
    found = bounds_of(torch.tensor(positions))
    assert found.tolist() == bounds and found.dtype is torch.int32


def test_without_a_gpu_attention_reads_a_mask() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert not fits(AutoConfig.for_model("llama"), torch.bfloat16)
