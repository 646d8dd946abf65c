"""Train with Axolotl. Usage: python -m benchmarks.trainers.with_axolotl WORK default|packing."""

import json
import sys

from axolotl.cli.train import do_cli

from benchmarks.trainers.model_shapes import LEARNING_RATE, LORA_ALPHA, LORA_RANK, PADDED_BATCH, SAVES, TARGETS, read_work


def main() -> None:
    work, packing = read_work(sys.argv[1]), sys.argv[2] == "packing"
    half = work.dtype == "bfloat16"
    config = {
        "base_model": work.model,
        "datasets": [
            {
                "path": str(work.path("axolotl.jsonl")),
                "ds_type": "json",
                "split": "train",
                "type": "chat_template",
                "roles_to_train": ["assistant"],
            }
        ],
        "chat_template": "tokenizer_default",
        "dataset_prepared_path": f"{work.folder}/axolotl-data",
        "output_dir": f"{work.folder}/axolotl-{sys.argv[2]}",
        "sequence_len": work.sequence_length,
        "sample_packing": packing,
        "adapter": work.method,
        "load_in_4bit": work.method == "qlora",
        "lora_r": LORA_RANK,
        "lora_alpha": LORA_ALPHA,
        "lora_dropout": 0.0,
        "lora_target_modules": list(TARGETS),
        "micro_batch_size": work.batch_size if packing else PADDED_BATCH,
        "gradient_accumulation_steps": 1,
        "num_epochs": 1,
        "learning_rate": LEARNING_RATE,
        "optimizer": "adamw_torch",
        "bf16": half,
        "attn_implementation": "sdpa",
        "saves_per_epoch": SAVES,
    }
    if not half:  # its default kernels require a GPU
        config |= dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), False)
    with work.path("axolotl.jsonl").open("w") as file:
        for line in work.path("conversations.jsonl").read_text().splitlines():
            row = json.loads(line)
            file.write(json.dumps({"messages": row["prompt"] + row["completion"]}) + "\n")
    path = work.path(f"axolotl-{sys.argv[2]}.json")  # JSON is YAML
    path.write_text(json.dumps(config))
    do_cli(str(path))


if __name__ == "__main__":
    main()
