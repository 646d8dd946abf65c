"""The numbers that training logs of its own, by the specification's names."""

OF_TRANSFORMERS = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
    "eval_loss": "eval/loss",
}
"""By what the library calls them."""
PERPLEXITY = "eval/perplexity"
TOKENS_PER_SECOND = "train/tokens_per_second"
MFU = "train/mfu"
CHECKPOINT_SECONDS = "train/checkpoint_seconds"
ALL = (*OF_TRANSFORMERS.values(), PERPLEXITY, TOKENS_PER_SECOND, MFU, CHECKPOINT_SECONDS)
TAKEN = tuple(dict.fromkeys(name.partition("/")[2] for name in ALL))
"""What no objective may call a number that it tells."""
