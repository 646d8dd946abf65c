"""Replica downloads from a server that breaks connections: resumed, verified, evicted."""

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from resources.errors import BadRequest, ChecksumMismatch, EngineError, EngineUnavailable
from resources.serving.file_cache import FileCache

CONTENT = bytes(range(256)) * 40
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server:
    """Serve one file with ranges.

    `breaks_after`: number of bytes of the first response before the connection ends.
    """

    def __init__(self, content: bytes = CONTENT, breaks_after: int | None = None, status: int = 200) -> None:
        self.content, self.breaks_after, self.status = content, breaks_after, status
        self.ranges: list[str | None] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        asked = request.headers.get("range")
        self.ranges.append(asked)
        if self.status != 200:
            return httpx.Response(self.status, text="refused")
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        body, self.breaks_after = self.content[start : self.breaks_after], None
        return httpx.Response(206 if asked else 200, content=body)


def fetch(folder: Path, server: Callable[[httpx.Request], httpx.Response], size: int = len(CONTENT)) -> Path:
    async def run() -> Path:
        async with httpx.AsyncClient(transport=httpx.MockTransport(server)) as http:
            return await FileCache(folder).fetch(SHA256, size, http, "http://api/file", {})

    return asyncio.run(run())


def test_file_is_downloaded_once(tmp_path: Path) -> None:
    server = Server()
    assert fetch(tmp_path, server).read_bytes() == CONTENT
    fetch(tmp_path, server)
    assert server.ranges == [None]


def test_interrupted_download_resumes(tmp_path: Path) -> None:
    server = Server(breaks_after=1000)
    with pytest.raises(EngineUnavailable, match="interrupted after 1000 of 10240 bytes"):
        fetch(tmp_path, server)
    assert fetch(tmp_path, server).read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=1000-"]


@pytest.mark.parametrize("size", [1000, len(CONTENT), len(CONTENT) + 1], ids=["short", "whole", "long"])
def test_damaged_part_is_downloaded_again(tmp_path: Path, size: int) -> None:
    (tmp_path / f"{SHA256}.part").write_bytes(bytes(size))
    assert fetch(tmp_path, Server()).read_bytes() == CONTENT


def test_download_with_a_wrong_checksum_is_refused_and_not_kept(tmp_path: Path) -> None:
    with pytest.raises(ChecksumMismatch, match="the download has SHA-256"):
        fetch(tmp_path, Server(content=CONTENT[:-1] + b"x"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("status", "error"), [(404, BadRequest), (403, EngineUnavailable), (503, EngineUnavailable)])
def test_refusal_is_final_unless_a_retry_can_help(tmp_path: Path, status: int, error: type[EngineError]) -> None:
    with pytest.raises(error, match=f"answered with {status}: refused"):
        fetch(tmp_path, Server(status=status))


def test_eviction_keeps_files_and_parts_that_are_needed(tmp_path: Path) -> None:
    for name in ("a.gguf", "a.part", "b.gguf", "c.part", "notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    assert sorted(FileCache(tmp_path).evict({"a"})) == ["b.gguf", "c.part"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf", "a.part", "notes.txt"]
