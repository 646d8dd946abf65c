"""The lower bound: packed rows and a plain PyTorch loop, without logging or checkpoints.

Usage: python -m benchmarks.trainers.hand_loop WORK REPORT
"""

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from benchmarks.trainers.model_shapes import LEARNING_RATE, LORA_ALPHA, LORA_RANK, MAX_GRAD_NORM, TARGETS, read_work
from benchmarks.trainers.trainer_cost import measure_training
from recipes.records.record_reader import read_records
from recipes.training.data.examples import encode_examples
from recipes.training.data.packing import collate, pack_examples


def main() -> None:
    work, report = read_work(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(work.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(work.model)
    examples = encode_examples(tokenizer, read_records(work.path("train")), None, work.sequence_length)
    rows = [vars(row) for row in pack_examples(examples, work.sequence_length, tokenizer.pad_token_id)]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(
        work.model,
        dtype=getattr(torch, work.dtype),
        attn_implementation="sdpa",
        quantization_config=BitsAndBytesConfig(**work.quantization) if work.quantization else None,
    ).to(device)
    lora = LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=list(TARGETS), task_type="CAUSAL_LM")
    model = get_peft_model(model, lora).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
    order = torch.randperm(len(rows)).tolist()
    with measure_training(report) as clock:
        for first in range(0, len(order), work.batch_size):
            batch = collate([rows[index] for index in order[first : first + work.batch_size]])
            model(**{name: tensor.to(device) for name, tensor in batch.items()}, use_cache=False).loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
            clock.step_done()


if __name__ == "__main__":
    main()
