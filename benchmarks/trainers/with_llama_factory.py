"""Train with LLaMA-Factory. Usage: python -m benchmarks.trainers.with_llama_factory WORK default|packing."""

import json
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

if find_spec("torchaudio") is None:  # imported for audio, which is not used here
    sys.modules["torchaudio"] = ModuleType("torchaudio")
    sys.modules["torchaudio"].__spec__ = ModuleSpec("torchaudio", None)

# isort: split
from llamafactory.train.tuner import run_exp

from benchmarks.trainers.model_shapes import LEARNING_RATE, LORA_ALPHA, LORA_RANK, PADDED_BATCH, SAVES, TARGETS, read_work


def main() -> None:
    work, packing = read_work(sys.argv[1]), sys.argv[2] == "packing"
    columns = {"prompt": "instruction", "response": "answer"}
    described = {"corpus": {"file_name": "train.jsonl", "columns": columns}}
    work.path("train/dataset_info.json").write_text(json.dumps(described))
    half = work.dtype == "bfloat16"
    run_exp(
        {
            "model_name_or_path": work.model,
            "stage": "sft",
            "do_train": True,
            "finetuning_type": "lora",
            "lora_rank": LORA_RANK,
            "lora_alpha": LORA_ALPHA,
            "lora_target": ",".join(TARGETS),
            **({"quantization_bit": 4, "double_quantization": True} if work.method == "qlora" else {}),
            "flash_attn": "sdpa",
            "disable_gradient_checkpointing": True,
            "dataset_dir": str(work.path("train")),
            "dataset": "corpus",
            "template": "chatml",
            "cutoff_len": work.sequence_length,
            "packing": packing,
            "neat_packing": packing,
            "per_device_train_batch_size": work.batch_size if packing else PADDED_BATCH,
            "num_train_epochs": 1.0,
            "learning_rate": LEARNING_RATE,
            "bf16": half,
            "use_cpu": not half,
            "output_dir": f"{work.folder}/llama-factory-{sys.argv[2]}",
            "save_steps": 1 / SAVES,
            "report_to": "none",
            "disable_tqdm": True,
        }
    )


if __name__ == "__main__":
    main()
