"""What a program settles before it imports the libraries."""

import gc
import os

import pytest

from recipes.imports import ALLOCATOR, begin_imports


@pytest.mark.parametrize("stated", [None, *ALLOCATOR])
def test_memory_of_a_gpu_grows_unless_its_user_says_otherwise(stated: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    if stated:
        monkeypatch.setenv(stated, "max_split_size_mb:128")
    before = dict(os.environ)
    try:
        begin_imports()
        found = {name: os.environ[name] for name in ALLOCATOR if name in os.environ}
    finally:
        gc.enable()
        os.environ.pop(ALLOCATOR[0], None)
        os.environ |= before
    assert found == ({stated: "max_split_size_mb:128"} if stated else {ALLOCATOR[0]: "expandable_segments:True"})
