"""Names of the metrics that training logs."""

TRANSFORMERS_NAMES = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
    "eval_loss": "eval/loss",
}
"""Keys are transformers' names."""
PERPLEXITY = "eval/perplexity"
TOKENS_PER_SECOND = "train/tokens_per_second"
MFU = "train/mfu"
CHECKPOINT_SECONDS = "train/checkpoint_seconds"
METRIC_NAMES = (*TRANSFORMERS_NAMES.values(), PERPLEXITY, TOKENS_PER_SECOND, MFU, CHECKPOINT_SECONDS)
RESERVED_NAMES = tuple(dict.fromkeys(name.partition("/")[2] for name in METRIC_NAMES))
"""Names that an objective may not use for its own metrics."""
