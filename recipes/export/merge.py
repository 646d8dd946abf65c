"""What was trained as one Hugging Face folder that answers as it did: an adapter merged into its base, or all weights.

Merges in float32 and casts once, so the only loss is the rounding to the stored type. An adapter that was trained beside
NF4 is merged into the base as it was before: NF4 stood for it while memory was short, and has no room for the sum without
being rounded anew. Evaluation scores that same sum, so what is judged is what is served. Deterministic: equal inputs give
equal bytes, so nothing that names a path or a version of a library is written.
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
"""Relative error of the logits that float32 arithmetic in another order may cause."""
ROUNDING_TOLERANCE = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}
"""Relative error of the logits that rounding every weight to the stored type may cause."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
PATH_KEYS = ("_name_or_path", "_model_name_or_path", "transformers_version")


@dataclass(frozen=True)
class Agreement:
    """How far the logits of the merged and of the stored model are from the trained one's, relative to their size."""

    merged: float
    stored: float


def merge_adapter(base: Path, adapter: Path, out: Path, dtype: str) -> Agreement:
    """Write base plus adapter to `out` in `dtype` and read it back to check it (specification row I14).

    Raises:
        BadConfiguration: not an adapter of this base, or the merged model does not answer as base plus adapter.
    """
    if not (adapter / "adapter_model.safetensors").is_file():
        raise BadConfiguration(f"{adapter} holds no adapter_model.safetensors: give a folder that PEFT saved as safetensors")
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
    """Write weights that were trained in all their parts to `out` in `dtype`, and read them back to check them.

    Raises:
        BadConfiguration: no model folder, or the stored model does not answer as the trained one.
    """
    probe = tokenize_probe(base)
    model = load_float32_model(weights)
    expected = compute_logits(model, probe)
    model.to(getattr(torch, dtype))
    save_model(model, base, out)
    del model
    return Agreement(merged=0.0, stored=measure_stored_error(out, dtype, probe, expected))


def measure_stored_error(out: Path, dtype: str, probe: torch.Tensor, expected: torch.Tensor) -> float:
    """Load what was stored; the relative error of its logits. Raises BadConfiguration where it is too large."""
    error = relative_error(compute_logits(load_float32_model(out), probe), expected)
    require_error_below(ROUNDING_TOLERANCE[dtype], error, f"rounding to {dtype} changed the answers: choose a wider type")
    return error


def load_float32_model(folder: Path) -> Any:
    """A causal model on the CPU in float32; pickled weights are never read."""
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        raise BadConfiguration(f"{folder} is not a model folder that transformers loads: {shorten_error(error)}") from None
    return model.eval()


def untie_adapted_weights(model: Any, adapter: Path) -> None:
    """Give the head weights of its own where an adapter changes it, or the embedding, and both are the same tensor.

    Training changed one of the two alone, while the merged sum in one tensor would change both.
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
    """The model with the adapter on it."""
    try:
        with warnings.catch_warnings():
            # PEFT only warns, and would merge a layer that the file does not hold as if it had learned nothing.
            warnings.filterwarnings("error", message=".*missing adapter keys")
            return PeftModel.from_pretrained(model, str(adapter), is_trainable=False, local_files_only=True).eval()
    except (UserWarning, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise BadConfiguration(f"{adapter} is not an adapter of this base model: {shorten_error(error)}") from None


def tokenize_probe(base: Path) -> torch.Tensor:
    """A short prompt as ids of the base's own tokenizer."""
    read_json(base / "tokenizer.json")  # its absence is one clear line
    return torch.tensor([Tokenizer.from_file(str(base / "tokenizer.json")).encode(PROBE_TEXT).ids])


def compute_logits(model: Any, probe: torch.Tensor) -> torch.Tensor:
    """Logits of every position of the probe.

    Raises:
        BadConfiguration: one of them is not a finite number.
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
    """Size of the difference over the size of what was expected, 0 when equal."""
    difference = (found - expected).norm()
    return float(difference / expected.norm()) if difference else 0.0


def require_error_below(limit: float, error: float, message: str) -> None:
    if not error <= limit:
        raise BadConfiguration(f"{message} (relative error of the logits {error:.2g}, allowed {limit:g})")


def save_model(model: Any, base: Path, out: Path) -> None:
    """Weights and configuration of a whole model, as `complete_model_folder` leaves them."""
    if out.exists():
        shutil.rmtree(out)  # what a killed run left
    model.save_pretrained(out)
    complete_model_folder(base, out)


def complete_model_folder(base: Path, out: Path) -> None:
    """What was saved, with a configuration that every runtime reads and names no place, and the tokenizer of its base."""
    config = read_json(out / "config.json")
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]  # older runtimes (Candle) read only this key
    # Training turns it off, in some strategies on the very model that is saved; whoever generates wants what the base has.
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
