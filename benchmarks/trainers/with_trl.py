"""Train with TRL, in an environment that has only TRL.

Usage: python -m benchmarks.trainers.with_trl WORK default|packing

As in TRL's documentation for prompts with completions, except for what the comparison requires: precision, sequence length,
learning rate, LoRA's shape, and no recomputation of activations, which no trainer here does.
"""

import sys

from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from benchmarks.trainers.model_shapes import LEARNING_RATE, LORA_ALPHA, LORA_RANK, PADDED_BATCH, SAVES, TARGETS, read_work


def main() -> None:
    work, packing = read_work(sys.argv[1]), sys.argv[2] == "packing"
    half = work.dtype == "bfloat16"
    quantized = {"quantization_config": work.quantization} if work.quantization else {}
    arguments = SFTConfig(
        output_dir=f"{work.folder}/trl-{sys.argv[2]}",
        max_length=work.sequence_length,
        packing=packing,
        per_device_train_batch_size=work.batch_size if packing else PADDED_BATCH,
        num_train_epochs=1,
        learning_rate=LEARNING_RATE,
        bf16=half,
        use_cpu=not half,
        gradient_checkpointing=False,
        save_steps=1 / SAVES,
        report_to=[],
        disable_tqdm=True,
        model_init_kwargs={"dtype": work.dtype, "attn_implementation": "sdpa"} | quantized,
    )
    trainer = SFTTrainer(
        model=work.model,
        args=arguments,
        train_dataset=load_dataset("json", data_files=str(work.path("conversations.jsonl")), split="train"),
        peft_config=LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=list(TARGETS), task_type="CAUSAL_LM"),
    )
    trainer.train()


if __name__ == "__main__":
    main()
