"""A model with five layers and a sliding window, for pipeline stages."""

import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from recipes.storage.base_model_folder import hash_model_folder
from tests.recipes.training.training_workspace import Place

WINDOW = 16

"""Attention window, in tokens, of the sliding-window layers of the model `qwen2`."""


@pytest.fixture(scope="module")
def deeper(place: Place) -> dict[str, Any]:
    """Return a model of five layers, the last with sliding windows, and an untied head."""
    tiny = place.folder / "model"
    kept = {"hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size"}
    stated = {name: value for name, value in json.loads((tiny / "config.json").read_text()).items() if name in kept}
    windows = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
    config = AutoConfig.for_model("qwen2", num_hidden_layers=5, tie_word_embeddings=False, **stated, **windows)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config)
    folder = place.folder / "deeper"
    model.bfloat16().save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    return {"base_model": {"uri": folder.as_uri(), "sha256": hash_model_folder(folder)}}
