"""Write a trained model as one Hugging Face folder.

An adapter merged into its base, or all weights. Merges in float32 and casts once, so that the only loss is rounding to the
stored dtype. A QLoRA adapter is merged into the original base: NF4 only replaced it to save memory, and would round the sum
again. Evaluation scores the same sum, so that the evaluated model is the served one. Deterministic: equal inputs give equal
bytes, so paths and library versions are not written.
"""

import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from recipes.contracts.job import BadConfiguration
from recipes.export.chat_templates import TEMPLATES_FOLDER
from recipes.export.model_json import read_json
from recipes.planning.recipe_checks import matches_target
from recipes.storage.manifest import canonical_json

PROBE_TEXT = "The quick brown fox asks: what is the name of the place where 12 ships lie at anchor?"
MERGE_TOLERANCE = 1e-3
"""Relative error of logits that a different order of float32 operations may cause."""
ROUNDING_TOLERANCE = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}
"""Relative error of logits that rounding all weights to the stored dtype may cause."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
PATH_KEYS = ("_name_or_path", "_model_name_or_path", "transformers_version")


@dataclass(frozen=True)
class Agreement:
    """Relative deviation of the merged and of the stored model's logits from the trained one's."""

    merged: float
    stored: float


def merge_adapter(base: Path, adapter: Path, out: Path, dtype: str) -> Agreement:
    """Write base plus adapter to `out` in `dtype`, and verify the stored model.

    Raises:
        BadConfiguration: it is no adapter of this base, or the merged model's logits deviate from base plus adapter.
    """
    if not (adapter / "adapter_model.safetensors").is_file():
        raise BadConfiguration(f"{adapter} has no adapter_model.safetensors: use a folder that PEFT saved as safetensors")
    probe = tokenize_probe(base)
    model = load_float32_model(base)
    untie_adapted_weights(model, adapter)
    with_adapter = attach_adapter(model, adapter)
    expected = compute_logits(with_adapter, probe)
    merged = with_adapter.merge_and_unload(safe_merge=True)
    merged_error = relative_error(compute_logits(merged, probe), expected)
    require_error_below(
        MERGE_TOLERANCE, merged_error, "merging changed the answers: train again without layers that cannot be merged"
    )
    merged.to(getattr(torch, dtype))
    save_model(merged, base, out)
    del model, with_adapter, merged
    return Agreement(merged=merged_error, stored=measure_stored_error(out, dtype, probe, expected))


def cast_weights(base: Path, weights: Path, out: Path, dtype: str) -> Agreement:
    """Write fully trained weights to `out` in `dtype`, and verify the stored model.

    Raises:
        BadConfiguration: it is no model folder, or the stored model's logits deviate from the trained one's.
    """
    probe = tokenize_probe(base)
    model = load_float32_model(weights)
    expected = compute_logits(model, probe)
    model.to(getattr(torch, dtype))
    save_model(model, base, out)
    del model
    return Agreement(merged=0.0, stored=measure_stored_error(out, dtype, probe, expected))


def measure_stored_error(out: Path, dtype: str, probe: torch.Tensor, expected: torch.Tensor) -> float:
    """Load the stored model and return the relative error of its logits.

    Raises BadConfiguration if it is too large.
    """
    error = relative_error(compute_logits(load_float32_model(out), probe), expected)
    require_error_below(ROUNDING_TOLERANCE[dtype], error, f"rounding to {dtype} changed the answers: choose a wider type")
    return error


def load_float32_model(folder: Path) -> Any:
    """Load a causal model on the CPU in float32; pickled weights are never read."""
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        raise BadConfiguration(f"{folder} is not a model folder that transformers loads: {shorten_error(error)}") from None
    return model.eval()


def untie_adapted_weights(model: Any, adapter: Path) -> None:
    """Untie the head from the embedding if an adapter changes one of them.

    Training changed only one of the two, while merging into a shared tensor would change both.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or head.weight is not embedding.weight:
        return
    stated = read_json(adapter / "adapter_config.json").get("target_modules") or []
    targets = [stated] if isinstance(stated, str) else stated
    ends = [name for name, module in model.named_modules() if module is embedding or module is head]
    if any(matches_target(name, target) for name in ends for target in targets):
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = False


def attach_adapter(model: Any, adapter: Path) -> Any:
    """Return the model with the adapter attached."""
    try:
        with warnings.catch_warnings():
            # PEFT only warns about missing layers, and would merge them as if they had learned nothing.
            warnings.filterwarnings("error", message=".*missing adapter keys")
            return PeftModel.from_pretrained(model, str(adapter), is_trainable=False, local_files_only=True).eval()
    except (UserWarning, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise BadConfiguration(f"{adapter} is not an adapter of this base model: {shorten_error(error)}") from None


def tokenize_probe(base: Path) -> torch.Tensor:
    """Tokenize a short prompt with the base's own tokenizer."""
    read_json(base / "tokenizer.json")  # reports a missing file clearly
    return torch.tensor([Tokenizer.from_file(str(base / "tokenizer.json")).encode(PROBE_TEXT).ids])


def compute_logits(model: Any, probe: torch.Tensor) -> torch.Tensor:
    """Return logits of every position of the probe.

    Raises:
        BadConfiguration: a value is not finite.
    """
    with torch.inference_mode():
        logits: torch.Tensor = model(probe).logits.float()
    if not torch.isfinite(logits).all():
        raise BadConfiguration(
            "the model gives logits that are not finite: "
            "train again from an earlier checkpoint or with a lower learning rate"
        )
    return logits


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference relative to the expected norm."""
    difference = (found - expected).norm()
    return float(difference / expected.norm()) if difference else 0.0


def require_error_below(limit: float, error: float, message: str) -> None:
    if not error <= limit:
        raise BadConfiguration(f"{message} (relative error of the logits {error:.2g}, allowed {limit:g})")


def save_model(model: Any, base: Path, out: Path) -> None:
    """Write weights and configuration of a whole model, with `complete_model_folder`."""
    if out.exists():
        shutil.rmtree(out)  # left by a killed run
    model.save_pretrained(out)
    complete_model_folder(base, out)


def complete_model_folder(base: Path, out: Path) -> None:
    """Complete a saved model: a portable configuration without paths, and the base's tokenizer."""
    config = read_json(out / "config.json")
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]  # older runtimes (Candle) read only this key
    # Training disables it, in some strategies on the very model that is saved; generation needs the base's value.
    config["use_cache"] = read_json(base / "config.json").get("use_cache", True)
    for key in PATH_KEYS:
        config.pop(key, None)
    (out / "config.json").write_bytes(canonical_json(config))
    (out / "generation_config.json").unlink(missing_ok=True)
    for name in (*TOKENIZER_FILES, "generation_config.json"):
        if (base / name).is_file():
            shutil.copyfile(base / name, out / name)
    if (base / TEMPLATES_FOLDER).is_dir():
        shutil.copytree(base / TEMPLATES_FOLDER, out / TEMPLATES_FOLDER, dirs_exist_ok=True)


def shorten_error(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
