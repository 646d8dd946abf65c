"""Prepare the import of heavy libraries: call these functions before importing them."""

import gc
import logging
import os
import warnings

SILENCED_MESSAGES = ("gemm_4bit_forward", "Setting accelerator to CPU", "Gradient accumulation steps mismatch")
"""bitsandbytes suggests a package that would download code, DeepSpeed logs a processor that was requested, and accelerate
that DeepSpeed counts a step's micro-batches, as configured (`recipes.planning.parallel_layout`).
"""

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables that torch reads at import; the second is an older name."""
EXPANDABLE_SEGMENTS = "expandable_segments:True"
"""Micro-batches have logits for different numbers of tokens: without this, free GPU memory is fragmented into pieces that
are too small.
"""


def prepare_imports() -> None:
    """Disable garbage collection during imports, set the CUDA allocator, and silence warnings.

    Imports create no garbage, and collecting cycles is a third of the start; `runner` enables it again. Warnings that
    readers of a job's log cannot act on are filtered.
    """
    gc.disable()
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ[ALLOCATOR_VARIABLES[0]] = EXPANDABLE_SEGMENTS
    for library in ("accelerate.accelerator", "bitsandbytes.backends.cpu.ops", "DeepSpeed"):
        logging.getLogger(library).addFilter(is_worth_logging)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(accelerate|torch|transformers)\.")


def is_worth_logging(record: logging.LogRecord) -> bool:
    return not any(message in record.getMessage() for message in SILENCED_MESSAGES)
