"""Local files of a replica, named by their SHA-256: download with resume, verify, evict."""

import asyncio
import os
from collections.abc import Collection
from pathlib import Path

import httpx

from recipes.storage.artifact_store import hash_file
from resources.errors import BadRequest, ChecksumMismatch, EngineError, EngineUnavailable

CHUNK_BYTES = 1 << 20
READ_TIMEOUT_SECONDS = 60


class FileCache:
    """A folder of GGUF files, each verified before it gets its name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, sha256: str) -> Path:
        return self._folder / f"{sha256}.gguf"

    async def fetch(self, sha256: str, size_bytes: int, http: httpx.AsyncClient, url: str, headers: dict[str, str]) -> Path:
        """Return the file; download it if missing, resuming an interrupted download.

        Raises:
            EngineUnavailable: the download was interrupted; received bytes are kept, and the next call resumes.
            ChecksumMismatch: the content differs; nothing is kept.
            EngineError: the API refuses the file, or the disk is full.
        """
        path = self.path(sha256)
        if path.exists():
            return path
        part = path.with_suffix(".part")
        try:
            is_resumed = await self._download(part, size_bytes, http, url, headers)
            found = await asyncio.to_thread(hash_file, part)
            if found != sha256 and is_resumed:
                # The stored file may be intact: a crash may have left a damaged partial download.
                part.unlink()
                await self._download(part, size_bytes, http, url, headers)
                found = await asyncio.to_thread(hash_file, part)
            if found != sha256:
                part.unlink()
                raise ChecksumMismatch(
                    f"the download has SHA-256 {found}, registered is {sha256}: restore the file or register it again",
                    expected=sha256,
                    found=found,
                )
            await asyncio.to_thread(rename_durably, part, path)
        except OSError as error:
            raise EngineError(f"cannot write to {self._folder} ({error.strerror}): give the replica more disk") from None
        return path

    def evict(self, kept: Collection[str]) -> list[str]:
        """Delete all files except those with the given SHA-256; return their names."""
        names = {f"{sha256}{suffix}" for sha256 in kept for suffix in (".gguf", ".part")}
        stale = [path for path in self._folder.iterdir() if path.suffix in (".gguf", ".part") and path.name not in names]
        for path in stale:
            path.unlink(missing_ok=True)
        return [path.name for path in stale]

    async def _download(
        self, part: Path, size_bytes: int, http: httpx.AsyncClient, url: str, headers: dict[str, str]
    ) -> bool:
        """Download the missing rest of a file; return whether a download was resumed."""
        have = part.stat().st_size if part.exists() else 0
        if have == size_bytes and have > 0:
            return True
        if have > size_bytes:
            part.unlink()
            have = 0
        asked = headers | ({"Range": f"bytes={have}-"} if have else {})
        try:
            async with http.stream("GET", url, headers=asked, follow_redirects=True, timeout=READ_TIMEOUT_SECONDS) as answer:
                await refuse_error(answer)
                is_resumed = answer.status_code == httpx.codes.PARTIAL_CONTENT
                with part.open("ab" if is_resumed else "wb") as file:
                    async for chunk in answer.aiter_bytes(CHUNK_BYTES):
                        await asyncio.to_thread(file.write, chunk)
        except httpx.TransportError as error:
            raise EngineUnavailable(f"the download was interrupted ({type(error).__name__})") from None
        if (arrived := part.stat().st_size) < size_bytes:
            raise EngineUnavailable(f"the download was interrupted after {arrived} of {size_bytes} bytes")
        return is_resumed


async def refuse_error(answer: httpx.Response) -> None:
    """Raise EngineError for an error response, EngineUnavailable if a retry can succeed."""
    if answer.is_success:
        return
    body = (await answer.aread()).decode(errors="replace")
    message = f"the download was answered with {answer.status_code}: {body:.200}"
    if answer.status_code >= 500 or answer.status_code in (401, 403, 408, 429):
        # Includes 403: a signed URL expires, and the next request gets a new one.
        raise EngineUnavailable(message)
    raise BadRequest(message)


def rename_durably(temporary: Path, final: Path) -> None:
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(final)
