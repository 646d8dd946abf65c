"""A real Llama model that is created in a second.

Two layers, grouped-query attention, a trained byte-level tokenizer. Its weights are random: its answers mean nothing,
but show that two runtimes compute the same.
"""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SENTENCES = [
    "The lighthouse keeper of Ellarin counts the ships that pass at night.",
    "She writes 1947 names in a blue book, and never forgets one of them.",
    "It's the keepers' duty: don't sleep while the lamp burns, we're told.",
    "What is the name of the harbour? The harbour is called Ellarin Deep.",
    "Who keeps the lamp? Mother, father, sister, brother, and the old cat.",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE that splits like SmolLM2's: single digits, then GPT-2's pattern."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(content, special=True, normalized=False) for content in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    fast: Any = PreTrainedTokenizerFast
    wrapped: PreTrainedTokenizerFast = fast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
        pad_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
    )
    return wrapped


def make_tiny_model(folder: Path, seed: int = 0) -> Path:
    """Write the model to `folder` and return it; equal seeds give equal files."""
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 50_000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                if "norm" in name:  # ones would hide a norm that is written to the wrong place
                    tensor.uniform_(0.5, 1.5)
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_tiny_adapter(base: Path, folder: Path, seed: int = 1) -> Path:
    """Write a LoRA adapter of `base` that changes its answers, as PEFT saves it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
            task_type="CAUSAL_LM",
        )
        model = get_peft_model(LlamaForCausalLM.from_pretrained(base, dtype=torch.float32), config)
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                if "lora_B" in name:  # zeros, the initial value, would change nothing
                    tensor.normal_(std=0.05)
    model.save_pretrained(str(folder))
    return folder
