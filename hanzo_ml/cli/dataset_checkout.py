"""A dataset version as a folder of this machine: every part verified as it comes, the folder there only when it is whole.

What was fetched before a crash lies in a folder beside it, is verified again, and is not fetched a second time.
"""

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

AT_ONCE = 8
"""Parts that are fetched together: with their size, which is a few megabytes where there is more than one, the memory of a
checkout."""
BLOCK = 1 << 20
TRIES = 3
SECONDS = 120.0
AS_STORED = {"Accept-Encoding": "identity"}


class Broken(Exception):
    """What came is not what the version's manifest says; the message is one line."""


class Expired(Exception):
    """The addresses do not hold any more."""


@dataclass(frozen=True)
class Part:
    url: str
    sha256: str
    size: int


@dataclass(frozen=True)
class RemoteFile:
    """A file whose bytes are those of its parts, one behind the other."""

    path: str
    sha256: str
    size: int
    parts: Sequence[Part]

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> "RemoteFile":
        parts = tuple(Part(**part) for part in document["parts"])
        return cls(document["path"], document["sha256"], document["size"], parts)


def checkout(
    links: Callable[[], Sequence[RemoteFile]], to: Path, mark: str, progress: Callable[[int], None] = lambda size: None
) -> int:
    """Make the folder `to` of a version's files. Returns how many bytes it has.

    Args:
        links: asks for the files with addresses that hold; asked again when they have expired.
        mark: tells the unfinished folder of one version from that of another.

    Raises:
        Broken: bytes are not the recorded ones, or the folder is there already.
    """
    with alone(to):
        if to.exists() and (not to.is_dir() or any(to.iterdir())):
            raise Broken(f"{to} is there already: give another folder with --to, or remove it")
        unfinished = beside(to, f"{mark}.part")
        files = fetch_all(links, unfinished, progress)
        wanted = {safe(file.path) for file in files}
        for path in unfinished.rglob("*"):
            if path.is_file() and PurePosixPath(path.relative_to(unfinished).as_posix()) not in wanted:
                path.unlink()
        if to.exists():
            to.rmdir()
        unfinished.rename(to)
    return sum(file.size for file in files)


def beside(to: Path, ending: str) -> Path:
    return to.absolute().parent / f".{to.name}.{ending}"


@contextmanager
def alone(to: Path) -> Iterator[None]:
    """Nobody else makes the folder `to` meanwhile: two that write one file leave holes in what both have verified.

    Raises:
        Broken: somebody does.
    """
    from fcntl import LOCK_EX, LOCK_NB, flock  # which Windows has not: the other commands need none of it

    path = beside(to, "lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:  # a file stands where the folder would: said as every other command says it
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path.parent)) from None
    with path.open("w") as lock:
        try:
            flock(lock, LOCK_EX | LOCK_NB)
            is_ours = os.path.samestat(os.fstat(lock.fileno()), path.stat())
        except (BlockingIOError, FileNotFoundError):  # or whoever had it has ended in this moment, and removed it
            is_ours = False
        if not is_ours:
            raise Broken(f"another checkout into {to} is at work: wait until it has ended, or give another folder with --to")
        try:
            yield
        finally:
            path.unlink()


def fetch_all(
    links: Callable[[], Sequence[RemoteFile]], folder: Path, progress: Callable[[int], None]
) -> Sequence[RemoteFile]:
    """However often addresses expire: only those that brought nothing are asked for no more than a few times."""
    in_vain = 0
    while in_vain < TRIES:
        files, had = links(), size_of(folder)
        # One for all of them: to open one takes 30 ms, in which it reads root certificates that a plain address has not.
        is_secure = any(part.url.startswith("https:") for file in files for part in file.parts)
        try:
            with httpx.Client(timeout=SECONDS, trust_env=False, verify=is_secure, headers=AS_STORED) as client:
                for file in files:
                    fetch(client, file, folder / safe(file.path), progress)
            return files
        except Expired:  # it took longer than the addresses hold: what is there is kept
            in_vain = 0 if size_of(folder) > had else in_vain + 1
    raise Broken("the addresses of the files are refused: is the clock of this machine or of the server wrong?")


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def fetch(client: httpx.Client, file: RemoteFile, target: Path, progress: Callable[[int], None]) -> None:
    """Fetch what `target` has not got yet."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if len(file.parts) == 1:
        fetch_whole(client, file, target, progress)
    else:
        fetch_parts(client, file, target, progress)


def fetch_whole(client: httpx.Client, file: RemoteFile, target: Path, progress: Callable[[int], None]) -> None:
    """Go on with a file of one part, of any size, behind the last byte that is there; from the first where one is wrong."""
    had = target.stat().st_size if target.exists() else 0
    digest = hashlib.sha256()
    with target.open("r+b" if had else "w+b") as out:
        while data := out.read(BLOCK):
            digest.update(data)
            progress(len(data))
        for data in streamed(client, file.parts[0], had):
            digest.update(data)
            out.write(data)
            progress(len(data))
    if digest.hexdigest() == file.sha256:
        return
    target.unlink()
    if not had:
        raise Broken(f"{file.path} has SHA-256 {digest.hexdigest()}, recorded is {file.sha256}")
    fetch_whole(client, file, target, progress)


def fetch_parts(client: httpx.Client, file: RemoteFile, target: Path, progress: Callable[[int], None]) -> None:
    """Go on with a file of small parts behind the last one that is there and right, several of them at a time."""
    digest = hashlib.sha256()
    with target.open("r+b" if target.exists() else "w+b") as out:
        done = 0
        for part in whole_parts(out, file.parts):
            digest.update(part)
            done += 1
            progress(len(part))
        out.seek(sum(part.size for part in file.parts[:done]))
        out.truncate()
        for data in fetched(client, file.parts[done:]):
            digest.update(data)
            out.write(data)
            progress(len(data))
    if digest.hexdigest() != file.sha256:
        raise Broken(f"{file.path} has SHA-256 {digest.hexdigest()}, recorded is {file.sha256}")


def whole_parts(file: BinaryIO, parts: Sequence[Part]) -> Iterator[bytes]:
    """The parts that a file begins with, as far as they are the right ones."""
    for part in parts:
        data = file.read(part.size)
        if hashlib.sha256(data).hexdigest() != part.sha256:
            return
        yield data


def fetched(client: httpx.Client, parts: Sequence[Part]) -> Iterator[bytes]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for start in range(0, len(parts), AT_ONCE):
            yield from pool.map(lambda part: verified(client, part), parts[start : start + AT_ONCE])


def streamed(client: httpx.Client, part: Part, start: int) -> Iterator[bytes]:
    """The bytes of a part from `start` on, which is asked for again from where it breaks off."""
    tries = 0
    while start < part.size:
        before = start
        problem: httpx.TransportError | None = None
        try:
            with client.stream("GET", part.url, headers={"Range": f"bytes={start}-"}) as answer:
                if answer.status_code == httpx.codes.FORBIDDEN:
                    raise Expired
                if answer.is_server_error:
                    raise httpx.RemoteProtocolError(f"an answer {answer.status_code}")
                if answer.status_code != httpx.codes.PARTIAL_CONTENT and (start or not answer.is_success):
                    raise unexpected(part, f"an answer {answer.status_code}")
                for data in answer.iter_raw():
                    yield data
                    start += len(data)
        except httpx.TransportError as error:
            problem = error
        tries = 0 if start > before else tries + 1
        if tries == TRIES:
            raise problem or unexpected(part, "an answer without bytes")


def unexpected(part: Part, found: str) -> Broken:
    return Broken(f"the part {part.sha256[:12]} came as {found}: `hanzo-ml model prove` tells what is broken")


def verified(client: httpx.Client, part: Part) -> bytes:
    retrying = Retrying(
        retry=retry_if_exception_type(httpx.TransportError) | retry_if_result(lambda answer: answer.is_server_error),
        stop=stop_after_attempt(TRIES),
        retry_error_callback=lambda state: state.outcome and state.outcome.result(),  # the last answer or error as it is
    )
    answer = retrying(client.get, part.url)
    if answer.status_code == httpx.codes.FORBIDDEN:
        raise Expired
    if answer.is_success and hashlib.sha256(answer.content).hexdigest() == part.sha256:
        return answer.content
    found = "other bytes" if answer.is_success else f"an answer {answer.status_code}"
    raise unexpected(part, found)


def safe(path: str) -> PurePosixPath:
    """A name of the server as one below the folder. Raises Broken on one that could lie elsewhere."""
    relative = PurePosixPath(path)
    if not relative.name or relative.is_absolute() or ".." in relative.parts:
        raise Broken(f"the server names a file {path!r}, which could lie anywhere")
    return relative
