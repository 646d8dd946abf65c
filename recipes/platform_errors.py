"""Recognize errors of the kernel, CUDA and libraries by number, class or text.

The only place that parses third-party text to classify why a program ended; responses of object stores are parsed in
`recipes.storage.buckets`. Does not import torch: preparation and validation run without it.
"""

import errno
import os
import re

from recipes.contracts.exit_reason import ExitReason

ALLOCATION_FAILED = re.compile(
    "DefaultCPUAllocator: can't allocate memory|CUDA out of memory|CUDA (driver )?error: out of memory"
    "|Cuda failure ([0-9]+ )?'out of memory'|Failed to CUDA calloc|CU(BLAS|DNN)_STATUS_ALLOC_FAILED"
    r"|Triton Error \[CUDA\]: out of memory",
    re.IGNORECASE,
)
"""PyTorch has an exception class only for its caching allocator on GPUs. The CPU, the CUDA driver, NCCL, cuBLAS, cuDNN and
Triton, and the allocator during compilation, raise others with these words. Of NCCL's messages PyTorch passes on only the
last: since 2.20 the one with the error's number, or with the size of the allocation."""

MENTIONS_MEMORY = re.compile("out of memory|OutOfMemory|MemoryError", re.IGNORECASE)
"""Broader than what recovery acts on: how any library, or a user's script, reports the error that ended the program."""

PEER_LOST = re.compile(
    r"gloo/transport/|Connection closed by peer \[|ncclRemoteError|remote process exited or there was a network error"
    "|DistNetworkError|recvValue failed|sendBytes failed",
    re.IGNORECASE,
)
"""Errors of gloo, NCCL and PyTorch's TCP store when a peer process is gone: a consequence of the peer's end, whose cause is
known later or never. When this was taken as the rank's own error, a job with a killed rank failed for good."""

NO_SPACE = re.compile(rf"\[Errno {errno.ENOSPC}\]|\(os error {errno.ENOSPC}\)|{os.strerror(errno.ENOSPC)}", re.IGNORECASE)
"""How programs report a full disk in the error that ended them."""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
TORCH_SAVE_TRUNCATED = re.compile("inline_container.* unexpected pos|iostream error")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed: the same work in smaller parts may fit."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return not names.isdisjoint({"MemoryError", "OutOfMemoryError"}) or ALLOCATION_FAILED.search(str(error)) is not None


def is_disk_full(error: BaseException) -> bool:
    return has_errno(error, *DISK_FULL) or TORCH_SAVE_TRUNCATED.search(str(error)) is not None


def has_errno(error: BaseException, *numbers: int) -> bool:
    """Return whether it is a kernel error with one of these numbers.

    Not all errors are OSError: libraries in Rust (safetensors, obstore) and `shutil.copytree` put the number into the
    message, torch.save the kernel's text.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in numbers
    text = "|".join(rf"\(os error {number}\)|\[Errno {number}\]|strerror: {os.strerror(number)}" for number in numbers)
    return re.search(text, str(error)) is not None


def classify_error(error: BaseException) -> ExitReason:
    """Return the exit reason for an unexpected error of a program."""
    if is_disk_full(error):
        return ExitReason.STORAGE_FULL
    if has_errno(error, errno.EROFS):
        return ExitReason.STORAGE_READ_ONLY
    return classify_output(f"{type(error).__name__}: {error}")


def classify_output(text: str) -> ExitReason:
    """Return the exit reason for a user's script, from its last line of output."""
    if NO_SPACE.search(text):
        return ExitReason.STORAGE_FULL
    if MENTIONS_MEMORY.search(text):
        return ExitReason.OUT_OF_MEMORY
    return ExitReason.UNKNOWN if PEER_LOST.search(text) else ExitReason.PROGRAM_ERROR
