"""Download a dataset version into a folder, verified and resumable."""

import errno
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import httpx
from tenacity import Retrying, retry_if_exception_type, retry_if_result, stop_after_attempt

CONCURRENT_PARTS = 8
"""Parts downloaded at a time. Times the part size, a few megabytes, this is the memory of a checkout."""
BLOCK_BYTES = 1 << 20
MAX_TRIES = 3
TIMEOUT_SECONDS = 120.0
IDENTITY_HEADERS = {"Accept-Encoding": "identity"}


class CheckoutError(Exception):
    """A downloaded file does not match the version's manifest; the message is one line."""


class UrlExpired(Exception):
    """The signed addresses have expired."""


@dataclass(frozen=True)
class FilePart:
    url: str
    sha256: str
    size: int


@dataclass(frozen=True)
class RemoteFile:
    """A file, as the concatenation of its parts."""

    path: str
    sha256: str
    size: int
    parts: Sequence[FilePart]

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> "RemoteFile":
        parts = tuple(FilePart(**part) for part in document["parts"])
        return cls(document["path"], document["sha256"], document["size"], parts)


def checkout_files(
    links: Callable[[], Sequence[RemoteFile]], to: Path, mark: str, progress: Callable[[int], None] = lambda size: None
) -> int:
    """Download a version's files into the folder `to`. Returns its size in bytes.

    Args:
        links: returns the files with fresh signed addresses; called again after they expire.
        mark: distinguishes the partial folders of different versions.

    Raises:
        CheckoutError: bytes do not match the manifest, or the folder is not empty.
    """
    with lock_folder(to):
        if to.exists() and (not to.is_dir() or any(to.iterdir())):
            raise CheckoutError(f"{to} exists and is not empty: choose another folder with --to, or remove it")
        unfinished = sibling_path(to, f"{mark}.part")
        files = download_all(links, unfinished, progress)
        wanted = {checked_path(file.path) for file in files}
        for path in unfinished.rglob("*"):
            if path.is_file() and PurePosixPath(path.relative_to(unfinished).as_posix()) not in wanted:
                path.unlink()
        if to.exists():
            to.rmdir()
        unfinished.rename(to)
    return sum(file.size for file in files)


def sibling_path(to: Path, ending: str) -> Path:
    return to.absolute().parent / f".{to.name}.{ending}"


@contextmanager
def lock_folder(to: Path) -> Iterator[None]:
    """Lock the folder `to`.

    Two checkouts into one file would leave holes in what both have verified.

    Raises:
        CheckoutError: another checkout holds the lock.
    """
    from fcntl import LOCK_EX, LOCK_NB, flock  # missing on Windows, where the other commands work

    path = sibling_path(to, "lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:  # a file is in the way: report it like every other command
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path.parent)) from None
    with path.open("w", encoding="utf-8") as lock:
        try:
            flock(lock, LOCK_EX | LOCK_NB)
            is_ours = os.path.samestat(os.fstat(lock.fileno()), path.stat())
        except (BlockingIOError, FileNotFoundError):  # or its owner has just ended and removed it
            is_ours = False
        if not is_ours:
            raise CheckoutError(
                f"another checkout into {to} is running: wait until it ends, or choose another folder with --to"
            )
        try:
            yield
        finally:
            path.unlink()


def download_all(
    links: Callable[[], Sequence[RemoteFile]], folder: Path, progress: Callable[[int], None]
) -> Sequence[RemoteFile]:
    """Download all files.

    Expired addresses are renewed without limit as long as each brings some bytes.
    """
    failures = 0
    while failures < MAX_TRIES:
        files, had_bytes = links(), folder_bytes(folder)
        # One client for all files: opening one loads root certificates, 30 ms, which plain HTTP does not need.
        is_secure = any(part.url.startswith("https:") for file in files for part in file.parts)
        try:
            with httpx.Client(
                timeout=TIMEOUT_SECONDS, trust_env=False, verify=is_secure, headers=IDENTITY_HEADERS
            ) as client:
                for file in files:
                    download_file(client, file, folder / checked_path(file.path), progress)
            return files
        except UrlExpired:  # keep what was downloaded before the addresses expired
            failures = 0 if folder_bytes(folder) > had_bytes else failures + 1
    raise CheckoutError("the signed addresses of the files are refused: check the clocks of this machine and of the server")


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def download_file(client: httpx.Client, file: RemoteFile, target: Path, progress: Callable[[int], None]) -> None:
    """Download the bytes that `target` lacks."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if len(file.parts) == 1:
        download_single_part(client, file, target, progress)
    else:
        download_parts(client, file, target, progress)


def download_single_part(client: httpx.Client, file: RemoteFile, target: Path, progress: Callable[[int], None]) -> None:
    """Resume a file of one part; restart it if the digest is wrong."""
    had_bytes = target.stat().st_size if target.exists() else 0
    digest = hashlib.sha256()
    with target.open("r+b" if had_bytes else "w+b") as out:
        while data := out.read(BLOCK_BYTES):
            digest.update(data)
            progress(len(data))
        for data in stream_part(client, file.parts[0], had_bytes):
            digest.update(data)
            out.write(data)
            progress(len(data))
    if digest.hexdigest() == file.sha256:
        return
    target.unlink()
    if not had_bytes:
        raise CheckoutError(f"{file.path} has SHA-256 {digest.hexdigest()}, recorded is {file.sha256}")
    download_single_part(client, file, target, progress)


def download_parts(client: httpx.Client, file: RemoteFile, target: Path, progress: Callable[[int], None]) -> None:
    """Resume a file after its last correct part, several parts at a time."""
    digest = hashlib.sha256()
    with target.open("r+b" if target.exists() else "w+b") as out:
        done = 0
        for part in read_verified_parts(out, file.parts):
            digest.update(part)
            done += 1
            progress(len(part))
        out.seek(sum(part.size for part in file.parts[:done]))
        out.truncate()
        for data in download_concurrently(client, file.parts[done:]):
            digest.update(data)
            out.write(data)
            progress(len(data))
    if digest.hexdigest() != file.sha256:
        raise CheckoutError(f"{file.path} has SHA-256 {digest.hexdigest()}, recorded is {file.sha256}")


def read_verified_parts(file: BinaryIO, parts: Sequence[FilePart]) -> Iterator[bytes]:
    """The parts that a file begins with, as far as they are the right ones."""
    for part in parts:
        data = file.read(part.size)
        if hashlib.sha256(data).hexdigest() != part.sha256:
            return
        yield data


def download_concurrently(client: httpx.Client, parts: Sequence[FilePart]) -> Iterator[bytes]:
    with ThreadPoolExecutor(CONCURRENT_PARTS) as pool:
        for start in range(0, len(parts), CONCURRENT_PARTS):
            yield from pool.map(lambda part: download_verified(client, part), parts[start : start + CONCURRENT_PARTS])


def stream_part(client: httpx.Client, part: FilePart, start: int) -> Iterator[bytes]:
    """Stream a part from byte `start` on, resuming where the connection breaks."""
    tries = 0
    while start < part.size:
        before = start
        problem: httpx.TransportError | None = None
        try:
            with client.stream("GET", part.url, headers={"Range": f"bytes={start}-"}) as answer:
                if answer.status_code == httpx.codes.FORBIDDEN:
                    raise UrlExpired
                if answer.is_server_error:
                    raise httpx.RemoteProtocolError(f"an answer {answer.status_code}")
                if answer.status_code != httpx.codes.PARTIAL_CONTENT and (start or not answer.is_success):
                    raise broken_part_error(part, f"an answer {answer.status_code}")
                for data in answer.iter_raw():
                    yield data
                    start += len(data)
        except httpx.TransportError as error:
            problem = error
        tries = 0 if start > before else tries + 1
        if tries == MAX_TRIES:
            raise problem or broken_part_error(part, "an answer without bytes")


def broken_part_error(part: FilePart, found: str) -> CheckoutError:
    return CheckoutError(f"the part {part.sha256[:12]} came as {found}: `hanzo-ml model prove` shows what is broken")


def download_verified(client: httpx.Client, part: FilePart) -> bytes:
    retrying = Retrying(
        retry=retry_if_exception_type(httpx.TransportError) | retry_if_result(lambda answer: answer.is_server_error),
        stop=stop_after_attempt(MAX_TRIES),
        retry_error_callback=lambda state: state.outcome and state.outcome.result(),  # the last answer or error as it is
    )
    answer = retrying(client.get, part.url)
    if answer.status_code == httpx.codes.FORBIDDEN:
        raise UrlExpired
    if answer.is_success and hashlib.sha256(answer.content).hexdigest() == part.sha256:
        return answer.content
    found = "other bytes" if answer.is_success else f"an answer {answer.status_code}"
    raise broken_part_error(part, found)


def checked_path(path: str) -> PurePosixPath:
    """A relative path from the server. Raises CheckoutError if it leaves the folder."""
    relative = PurePosixPath(path)
    if not relative.name or relative.is_absolute() or ".." in relative.parts:
        raise CheckoutError(f"the server names a file {path!r}, which could lie anywhere")
    return relative
