"""How a program takes up the libraries that it stands on. What is called here is called before they are imported."""

import gc
import logging
import os
import warnings

NO_NEWS = ("gemm_4bit_forward", "Setting accelerator to CPU", "Gradient accumulation steps mismatch")
"""bitsandbytes names a package that it would fetch code with from the internet, DeepSpeed a processor that was asked for,
and accelerate that DeepSpeed counts the micro-batches of a step, as it was told to (`recipes.launch`).
"""

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables that torch reads as it is imported; the second is an older name."""
GROWING = "expandable_segments:True"
"""Micro-batches have logits for as many tokens as they teach, each another number: without this, what is free of a GPU's
memory ends up in pieces that are too small for the next one.
"""


def begin_imports() -> None:
    """Nothing dies of what imports make, and the search for cycles in it is a third of the start: `runner` begins it again.

    A job's log begins with what the job does, instead of advice that nobody who reads it can heed.
    """
    gc.disable()
    if not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = GROWING
    for library in ("accelerate.accelerator", "bitsandbytes.backends.cpu.ops", "DeepSpeed"):
        logging.getLogger(library).addFilter(is_news)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(accelerate|torch|transformers)\.")


def is_news(record: logging.LogRecord) -> bool:
    return not any(words in record.getMessage() for words in NO_NEWS)
