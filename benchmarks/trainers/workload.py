"""The common work: a small Llama with random weights, long-tailed records, one epoch.

A folder holds the input of every tool: `model/`, `train/train.jsonl`, `conversations.jsonl`, and `work.json`.
"""

import json
import math
from dataclasses import astuple
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.preparation.corpus import write_corpus
from benchmarks.trainers.model_shapes import Shape, Work
from recipes.records.record_reader import read_records
from recipes.training.data.examples import encode_examples
from recipes.training.data.packing import pack_examples

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RECORDS_FOR_TOKENIZER = 500


def make_work(folder: Path, shape: Shape, method: str, records: int, threads: int, models: Path) -> Work:
    """Write the folder. Tokens are counted by our encoding, truncated, for all tools.

    The model is created if `models` has none of that shape: a 7B model takes 13 GB.
    """
    (folder / "train").mkdir(parents=True)
    write_corpus(folder / "train" / "train.jsonl", records)
    model = models / "-".join(map(str, (*astuple(shape)[:-2], records)))
    if not model.exists():
        make_model(model, shape, folder / "train" / "train.jsonl")
    (folder / "model").symlink_to(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [json.loads(line) for line in (folder / "train" / "train.jsonl").read_text().splitlines()]
    with (folder / "conversations.jsonl").open("w") as file:
        for row in rows:
            prompt = [{"role": "user", "content": row["instruction"]}]
            completion = [{"role": "assistant", "content": row["answer"]}]
            file.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")
    examples = encode_examples(tokenizer, read_records(folder / "train"), None, shape.sequence_length)
    packed = pack_examples(examples, shape.sequence_length, tokenizer.pad_token_id)
    work = Work(
        folder=str(folder),
        tokens=sum(len(example.tokens) for example in examples),
        records=len(examples),
        steps=math.ceil(len(packed) / shape.batch_size),
        sequence_length=shape.sequence_length,
        batch_size=shape.batch_size,
        dtype=shape.dtype,
        method=method,
        threads=threads,
    )
    (folder / "work.json").write_text(json.dumps(vars(work)))
    return work


def make_model(folder: Path, shape: Shape, corpus: Path) -> None:
    """Create a Llama with random weights, and a byte-level tokenizer trained on the corpus."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=shape.vocab_size,
        special_tokens=[AddedToken(content, special=True, normalized=False) for content in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bare.train_from_iterator(corpus.read_text().splitlines()[:RECORDS_FOR_TOKENIZER], trainer)
    wrap: Any = PreTrainedTokenizerFast
    tokenizer = wrap(
        tokenizer_object=bare,
        bos_token=SPECIAL[1],
        eos_token=SPECIAL[2],
        unk_token=SPECIAL[0],
        pad_token=SPECIAL[0],
        chat_template=CHATML,
    )
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        max_position_embeddings=8192,
        tie_word_embeddings=shape.tied,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config).to(getattr(torch, shape.dtype))
    model.save_pretrained(folder, max_shard_size="5GB")  # usual shard size: files are hashed in parallel
    tokenizer.save_pretrained(folder)
