"""Open buckets in folders or on S3, detect lost mounts, and translate errors."""

import errno
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

from obstore.exceptions import BaseError, PreconditionError
from obstore.store import LocalStore, S3Store

from recipes.contracts.job import StoreAddress
from recipes.storage.locations import local_store_root

# What lies in a folder of the store, as a listing of S3 has it: complete files, and no empty folders.

UNFINISHED_UPLOAD = re.compile(r".*#\d+")
"""What obstore calls a file of a folder that is not complete yet; no listing shows it."""


def walk_files(folder: Path) -> Iterator[tuple[Path, int]]:
    """The complete files below a folder, and their sizes."""
    for name, size in scan_folder(folder):
        if size is None:
            yield from walk_files(folder / name)
        else:
            yield folder / name, size


def list_folder(folder: Path) -> tuple[list[tuple[str, int]], list[str]]:
    """Names and sizes of the complete files in a folder, and names of the folders that have one somewhere below."""
    files, folders = [], []
    for name, size in scan_folder(folder):
        if size is not None:
            files.append((name, size))
        elif next(walk_files(folder / name), None):
            folders.append(name)
    return files, folders


def scan_folder(folder: Path) -> Iterator[tuple[str, int | None]]:
    """Names and sizes of the complete files in a folder; of a folder there, None. No link is followed: behind one may lie
    anything.

    What another deletes meanwhile is not among them, as in a listing of S3.
    """
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as found:
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                yield entry.name, None
            elif entry.is_file(follow_symlinks=False) and not UNFINISHED_UPLOAD.fullmatch(entry.name):
                with suppress(FileNotFoundError):
                    yield entry.name, entry.stat(follow_symlinks=False).st_size


# A store that is a folder: a bucket is made once, and one that is not there later is away, and not empty.
#
# A network folder that is not mounted is an empty one, or none. It read as an empty store: a training that was taken up
# at such a moment began anew.

BUCKET_MARKER = ".bucket"
"""The mark in a bucket's folder, where no key leads. A put that was on its way as the folder went away makes another one of
its name, as the library does: that one has none.
"""


def mount_marker(root: Path, name: str) -> Path:
    """What says beside the root that a bucket was made in it."""
    return root.with_name(f".{root.name}-made") / name


def make_bucket_folder(root: Path, name: str) -> Path:
    """The folder of a bucket, made and marked where it never was. Raises OSError."""
    folder, mark = root / name, mount_marker(root, name)
    if not mark.exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / BUCKET_MARKER).touch()
        mark.parent.mkdir(exist_ok=True)
        mark.touch()
    return folder


def find_unmounted_bucket(address: StoreAddress) -> Path | None:
    """The mark of a bucket that was made and is not there: it is not mounted, or was moved away."""
    root = local_store_root(address)
    if root is None:
        return None
    names = (name for name in address.buckets.values() if mount_marker(root, name).exists() and not is_mounted(root / name))
    return next((mount_marker(root, name) for name in names), None)


def is_mounted(bucket: Path) -> bool:
    """False too where a network folder says that it does not answer, which it does in many ways."""
    try:
        return (bucket / BUCKET_MARKER).exists()
    except OSError:
        return False


# What an S3 server answered, or why it did not, in one line that names the settings to look at. Pure.
#
# The library's line ends where the server's answer begins, and has nothing of why there was none: a certificate that was
# not trusted read as a server that is away.

HTTP_STATUS = re.compile(r"status code: (\d{3} [\w ]+)")
S3_ERROR_CODE = re.compile(r"<Code>(\w+)</Code>")
S3_ERROR_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")
UNTRUSTED_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(?:Other\(\s*OtherError\(\s*)?(\w+)")
SYSTEM_ERROR = re.compile(r'(?:message|error): "([^"]*)"')
DENIED_STATUSES = ("401", "403")
NO_SUCH_BUCKET = "NoSuchBucket"


def is_denied(error: str) -> bool:
    """Whether a server said what it will say until a setting, or what is allowed there, is another one."""
    status = HTTP_STATUS.search(error)
    return NO_SUCH_BUCKET in error or (status is not None and status[1].startswith(DENIED_STATUSES))


def explain_s3_error(error: str, endpoint: str, bucket: str) -> str:
    """`error` is the text of what the library raised when it asked a bucket at an endpoint."""
    if refused := UNTRUSTED_CERTIFICATE.search(error):
        remedy = "setting storage.endpoint; the variable SSL_CERT_FILE names a file with other authorities"
        return f"the certificate of {endpoint} is not trusted: {refused[1]} ({remedy})"
    status, code, message = HTTP_STATUS.search(error), S3_ERROR_CODE.search(error), S3_ERROR_MESSAGE.search(error)
    if status:
        answer = ": ".join([status[1].strip(), *(found[1] for found in (code, message) if found)])
        if code and code[1] == NO_SUCH_BUCKET:
            return f"{endpoint} has no bucket {bucket} (settings storage.buckets, storage.endpoint)"
        if answer.startswith(DENIED_STATUSES):
            keys = "settings storage.access_key, storage.secret_key"
            return f"{endpoint} refuses what the keys are used for, with {answer} ({keys})"
        return f"{endpoint} answers {answer}"
    if "HTTP error" in error:
        why = SYSTEM_ERROR.search(error)
        return f"{endpoint} does not answer: {why[1] if why else 'the connection broke'} (setting storage.endpoint)"
    return error.splitlines()[0][:500]


# Buckets: folders in embedded mode, else on an S3 server; and what can go wrong with them, told apart.
#
# With `recipes.storage.object_store` the only place that touches `obstore`.

Bucket: TypeAlias = LocalStore | S3Store
STORAGE_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
OS_ERROR_CODE = re.compile(r"os error (\d+)")


NO_SPACE_SUFFIX = ": no space is left"


class StoreFull(Exception):
    """No space is left where the objects lie: the URI that had no room, and `NO_SPACE_SUFFIX`."""


class StoreUnavailable(Exception):
    """The object store does not answer, or refuses what it was asked."""


class StoreRefuses(StoreUnavailable):
    """The keys are wrong or may not do this, or there is no such bucket: to wait for it does not help."""


class ObjectReplaced(FileNotFoundError):
    """What was being read is no more: another object lies at its place."""


def open_bucket(name: str, address: StoreAddress, variables: Mapping[str, str]) -> Bucket:
    """A bucket on the server of an address, or its folder. Every put asks for encryption at rest (row X1).

    And tells its checksum, as each part of a large one does: of what a wire, a proxy or a disk's buffer changed, the server
    then stores nothing. The library has it already, for the signature.

    Raises:
        StoreUnavailable: the folder was made once, and is not there.
        OSError: it cannot be made.
    """
    root = local_store_root(address)
    if root is not None:
        if not is_mounted(root / name) and (mark := find_unmounted_bucket(address)):
            remedy = f"mount it again (or remove {mark}, and it is taken as it is)"
            raise StoreUnavailable(f"{root / mark.name} is not the bucket that it was: {remedy}")
        folder = make_bucket_folder(root, name)
        try:
            return LocalStore(folder)
        except BaseError:  # it went away since
            raise StoreUnavailable(f"{folder} is not there: mount it again") from None
    config: dict[str, Any] = {variable.lower(): value for variable, value in variables.items()}
    if address.encryption != "none":
        config["aws_server_side_encryption"] = address.encryption
    if address.kms_key:
        config["aws_sse_kms_key_id"] = address.kms_key
    if address.checksum != "none":
        config["aws_checksum_algorithm"] = address.checksum
    return S3Store(
        name,
        config=config,
        endpoint=address.root,
        # The library's 30 s are for a whole answer, however large: an object of some GB takes longer.
        client_options={
            "allow_http": address.root.startswith("http:"),
            "timeout": timedelta(hours=12),
            "read_timeout": timedelta(seconds=60),
        },
        virtual_hosted_style_request=False,
    )


def require_mounted_bucket(uri: str, bucket: Bucket) -> None:
    """Raises StoreUnavailable: the bucket is a folder, and that is not there: not mounted any more, or moved away."""
    if isinstance(bucket, LocalStore) and not is_mounted(Path(str(bucket.prefix))):
        raise StoreUnavailable(f"{uri}: its bucket {bucket.prefix} is not there: mount it again")


@contextmanager
def translate_listing_errors(uri: str, bucket: Bucket) -> Iterator[None]:
    """Around a look into the folders of a bucket: what was not found while it went away is not known to be missing.

    A network folder says in many ways that it does not answer.
    """
    try:
        yield
    except OSError as error:
        raise StoreUnavailable(f"{uri}: {error.strerror}") from error
    require_mounted_bucket(uri, bucket)


@contextmanager
def translate_store_errors(uri: str, bucket: Bucket, *, writing: bool = False) -> Iterator[None]:
    """Turn what the library raises into what callers tell apart: missing, full, or no answer.

    Of a bucket whose folder went away nothing is missing, and nothing is written: the library would make it anew, where
    another lies as soon as it is mounted again. It does all the same where the folder goes just then: that is no success.
    """
    if writing:
        require_mounted_bucket(uri, bucket)
    try:
        yield
        if writing:
            require_mounted_bucket(uri, bucket)
    except PreconditionError:
        raise ObjectReplaced(f"{uri} was replaced while it was read") from None
    except FileNotFoundError as error:
        require_mounted_bucket(uri, bucket)
        if writing or is_denied(str(error)):
            raise unavailable_error(uri, str(error), bucket) from None
        raise FileNotFoundError(f"nothing lies at {uri}") from None
    except BaseError as error:
        text = str(error)
        code = int(found.group(1)) if (found := OS_ERROR_CODE.search(text)) else None
        if code in STORAGE_FULL_ERRNOS:
            raise StoreFull(uri + NO_SPACE_SUFFIX) from None
        if code in (errno.ENOTDIR, errno.EISDIR) and not writing:  # a folder's name that is a file's, or the reverse
            raise FileNotFoundError(f"nothing lies at {uri}") from None
        raise unavailable_error(uri, text, bucket) from error


def unavailable_error(uri: str, error: str, bucket: Bucket) -> StoreUnavailable:
    """What the library said, in one line."""
    if isinstance(bucket, LocalStore):
        return StoreUnavailable(f"{uri}: {error.splitlines()[0][:500]}")
    kind = StoreRefuses if is_denied(error) else StoreUnavailable
    return kind(f"{uri}: {explain_s3_error(error, str(bucket.config.get('endpoint')), str(bucket.config.get('bucket')))}")
