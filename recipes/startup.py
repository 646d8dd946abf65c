"""How a program takes up the libraries that it stands on. What is called here is called before they are imported."""

import gc
import logging
import os
import warnings

SILENCED_MESSAGES = ("gemm_4bit_forward", "Setting accelerator to CPU", "Gradient accumulation steps mismatch")
"""bitsandbytes names a package that it would fetch code with from the internet, DeepSpeed a processor that was asked for,
and accelerate that DeepSpeed counts the micro-batches of a step, as it was told to (`recipes.planning.parallel_layout`).
"""

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables that torch reads as it is imported; the second is an older name."""
EXPANDABLE_SEGMENTS = "expandable_segments:True"
"""Micro-batches have logits for as many tokens as they teach, each another number: without this, what is free of a GPU's
memory ends up in pieces that are too small for the next one.
"""


def prepare_imports() -> None:
    """Nothing dies of what imports make, and the search for cycles in it is a third of the start: `runner` begins it again.

    A job's log begins with what the job does, instead of advice that nobody who reads it can heed.
    """
    gc.disable()
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ[ALLOCATOR_VARIABLES[0]] = EXPANDABLE_SEGMENTS
    for library in ("accelerate.accelerator", "bitsandbytes.backends.cpu.ops", "DeepSpeed"):
        logging.getLogger(library).addFilter(is_worth_logging)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(accelerate|torch|transformers)\.")


def is_worth_logging(record: logging.LogRecord) -> bool:
    return not any(message in record.getMessage() for message in SILENCED_MESSAGES)
