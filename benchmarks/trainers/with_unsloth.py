"""Train with Unsloth, on a GPU.

Usage: python -m benchmarks.trainers.with_unsloth WORK default|packing

By default it concatenates the records of a batch if the GPU supports it, instead of padding.
"""

import sys

from unsloth import FastLanguageModel  # before transformers, which it patches

# isort: split
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

from benchmarks.trainers.model_shapes import LEARNING_RATE, LORA_ALPHA, LORA_RANK, PADDED_BATCH, SAVES, TARGETS, read_work


def main() -> None:
    work, packing = read_work(sys.argv[1]), sys.argv[2] == "packing"
    model, tokenizer = FastLanguageModel.from_pretrained(
        work.model, max_seq_length=work.sequence_length, load_in_4bit=work.method == "qlora", dtype=None
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=LORA_RANK,
        lora_alpha=LORA_ALPHA,
        target_modules=list(TARGETS),
        lora_dropout=0,
        use_gradient_checkpointing=False,
    )
    arguments = SFTConfig(
        output_dir=f"{work.folder}/unsloth-{sys.argv[2]}",
        max_length=work.sequence_length,
        packing=packing,
        per_device_train_batch_size=work.batch_size if packing else PADDED_BATCH,
        num_train_epochs=1,
        learning_rate=LEARNING_RATE,
        gradient_accumulation_steps=1,  # Unsloth's default is 2
        gradient_checkpointing=False,
        save_steps=1 / SAVES,
        report_to=[],
        disable_tqdm=True,
    )
    records = load_dataset("json", data_files=str(work.path("conversations.jsonl")), split="train")
    SFTTrainer(model=model, processing_class=tokenizer, args=arguments, train_dataset=records).train()


if __name__ == "__main__":
    main()
