"""Settings that a program makes before importing the libraries."""

import gc
import logging
import os
import warnings
from collections.abc import Iterator

import pytest

from recipes.startup import ALLOCATOR_VARIABLES, prepare_imports


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = dict(os.environ)
    with warnings.catch_warnings():
        yield
    gc.enable()
    os.environ.pop(ALLOCATOR_VARIABLES[0], None)
    os.environ |= before


@pytest.mark.parametrize(
    ("module", "shown"),
    [("transformers.trainer", 0), ("accelerate.accelerator", 0), ("torch.distributed.c10d_logger", 0), ("own_objective", 1)],
)
def test_future_warnings_of_libraries_are_hidden(module: str, shown: int) -> None:
    """Regression: each process of a job logged accelerate's deprecation warnings."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        prepare_imports()
        warnings.warn_explicit("it is called otherwise", FutureWarning, "a.py", 1, module=module)
    assert len(seen) == shown


@pytest.mark.parametrize(
    ("words", "shown"), [("Gradient accumulation steps mismatch: GradientAccumulationPlugin has 1", 0), ("it is full", 1)]
)
def test_deepspeed_accumulation_warning_is_hidden(words: str, shown: int, caplog: pytest.LogCaptureFixture) -> None:
    """Regression: ZeRO runs logged a warning about an intended setting."""
    prepare_imports()
    logging.getLogger("accelerate.accelerator").warning(words)
    assert len(caplog.records) == shown


@pytest.mark.parametrize("stated", [None, *ALLOCATOR_VARIABLES])
def test_gpu_allocator_uses_expandable_segments_unless_configured(
    stated: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if stated:
        monkeypatch.setenv(stated, "max_split_size_mb:128")
    prepare_imports()
    found = {name: os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ}
    assert found == ({stated: "max_split_size_mb:128"} if stated else {ALLOCATOR_VARIABLES[0]: "expandable_segments:True"})
