"""What a training run leaves: its final weights as an artifact."""

import json
from pathlib import Path

from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from recipes.schema import Artifact, Job
from recipes.store import Store


def publish_adapter(
    model: PeftModel, tokenizer: PreTrainedTokenizerBase, store: Store, job: Job, base: Artifact, work: Path
) -> Artifact:
    """The final adapter with its tokenizer. Its digest depends on the training alone, not on the place or the time."""
    folder = work / "adapter"
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    config_file = folder / "adapter_config.json"
    config = json.loads(config_file.read_text())
    config["base_model_name_or_path"] = base.uri
    config["target_modules"] = sorted(config["target_modules"])  # a set in the library: its order differs by process
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True))
    tokenizer.save_pretrained(folder)
    inputs = {role: job.inputs[role].digest for role in ("run", "train", "validation")} | {"base": base.digest}
    return store.publish(folder, job.outputs["adapter"], "adapter", inputs=inputs)
