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

# Listings of buckets in folders, equal to S3 listings: complete files only, and no empty folders.

UNFINISHED_UPLOAD = re.compile(r".*#\d+")
"""obstore's names for incomplete files in a folder; never listed."""


def walk_files(folder: Path) -> Iterator[tuple[Path, int]]:
    """Yield complete files below a folder with their sizes."""
    for name, size in scan_folder(folder):
        if size is None:
            yield from walk_files(folder / name)
        else:
            yield folder / name, size


def list_folder(folder: Path) -> tuple[list[tuple[str, int]], list[str]]:
    """Return names and sizes of complete files in a folder, and names of non-empty folders."""
    files, folders = [], []
    for name, size in scan_folder(folder):
        if size is not None:
            files.append((name, size))
        elif next(walk_files(folder / name), None):
            folders.append(name)
    return files, folders


def scan_folder(folder: Path) -> Iterator[tuple[str, int | None]]:
    """Yield names and sizes of complete files in a folder.

    For folders the size is None. Symbolic links are not followed, because they may lead outside. Files deleted concurrently
    are left out, as in S3 listings.
    """
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as found:
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                yield entry.name, None
            elif entry.is_file(follow_symlinks=False) and not UNFINISHED_UPLOAD.fullmatch(entry.name):
                with suppress(FileNotFoundError):
                    yield entry.name, entry.stat(follow_symlinks=False).st_size


# Buckets in a folder are created once; a bucket that is missing later is unavailable, not empty.
#
# An unmounted network folder is empty or missing. It used to be taken for an empty store: a training that was resumed at
# such a moment started from the beginning.

BUCKET_MARKER = ".bucket"
"""Marker file in a bucket's folder, outside all keys. A put during an unmount recreates the bucket's folder, as obstore
does, but without the marker.
"""


def mount_marker(root: Path, name: str) -> Path:
    """Return the file that records that a bucket was created.

    It is next to the root.
    """
    return root.with_name(f".{root.name}-made") / name


def make_bucket_folder(root: Path, name: str) -> Path:
    """Return the folder of a bucket, created and marked at its first use. Raises OSError."""
    folder, mark = root / name, mount_marker(root, name)
    if not mark.exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / BUCKET_MARKER).touch()
        mark.parent.mkdir(exist_ok=True)
        mark.touch()
    return folder


def find_unmounted_bucket(address: StoreAddress) -> Path | None:
    """Return the record of a bucket that was created but is unmounted or moved now."""
    root = local_store_root(address)
    if root is None:
        return None
    names = (name for name in address.buckets.values() if mount_marker(root, name).exists() and not is_mounted(root / name))
    return next((mount_marker(root, name) for name in names), None)


def is_mounted(bucket: Path) -> bool:
    """Return whether a bucket's folder is available.

    Network folders fail in many ways if they are not.
    """
    try:
        return (bucket / BUCKET_MARKER).exists()
    except OSError:
        return False


# Describe errors of an S3 server in one line that names the settings to check. Pure functions.
#
# The library's message stops where the server's answer begins and omits why there was none: an untrusted certificate
# looked like an unreachable server.

HTTP_STATUS = re.compile(r"status code: (\d{3} [\w ]+)")
S3_ERROR_CODE = re.compile(r"<Code>(\w+)</Code>")
S3_ERROR_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")
UNTRUSTED_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(?:Other\(\s*OtherError\(\s*)?(\w+)")
SYSTEM_ERROR = re.compile(r'(?:message|error): "([^"]*)"')
DENIED_STATUSES = ("401", "403")
NO_SUCH_BUCKET = "NoSuchBucket"


def is_denied(error: str) -> bool:
    """Return whether an error is permanent until a setting or a permission changes."""
    status = HTTP_STATUS.search(error)
    return NO_SUCH_BUCKET in error or (status is not None and status[1].startswith(DENIED_STATUSES))


def explain_s3_error(error: str, endpoint: str, bucket: str) -> str:
    """Describe the library's error text for a request to a bucket at an endpoint."""
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


# Buckets in folders (embedded mode) or on an S3 server, and their errors.
#
# With `recipes.storage.object_store` the only place that uses `obstore`.

Bucket: TypeAlias = LocalStore | S3Store
STORAGE_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
OS_ERROR_CODE = re.compile(r"os error (\d+)")


NO_SPACE_SUFFIX = ": no space is left"


class StoreFull(Exception):
    """No space is left in the object store; the message is the URI and `NO_SPACE_SUFFIX`."""


class StoreUnavailable(Exception):
    """The object store does not answer, or rejects a request."""


class StoreRefuses(StoreUnavailable):
    """The credentials are wrong or lack permission, or the bucket does not exist.

    Retries do not help.
    """


class ObjectReplaced(FileNotFoundError):
    """The object was replaced or removed while it was read."""


def open_bucket(name: str, address: StoreAddress, variables: Mapping[str, str]) -> Bucket:
    """Open a bucket on an S3 server, or its folder.

    Every put requests encryption at rest and sends a checksum, also per part: the server then rejects bytes that a wire, a
    proxy or a disk's buffer has changed. The library computes the checksum anyway, for the signature.

    Raises:
        StoreUnavailable: the bucket's folder was created earlier and is missing.
        OSError: it cannot be created.
    """
    root = local_store_root(address)
    if root is not None:
        if not is_mounted(root / name) and (mark := find_unmounted_bucket(address)):
            remedy = f"mount it again (or remove {mark} to use the folder as it is)"
            raise StoreUnavailable(f"{root / mark.name} is no longer the bucket that was created there: {remedy}")
        folder = make_bucket_folder(root, name)
        try:
            return LocalStore(folder)
        except BaseError:  # it disappeared in the meantime
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
        # The library's default of 30 s is for a whole response: an object of several GB takes longer.
        client_options={
            "allow_http": address.root.startswith("http:"),
            "timeout": timedelta(hours=12),
            "read_timeout": timedelta(seconds=60),
        },
        virtual_hosted_style_request=False,
    )


def require_mounted_bucket(uri: str, bucket: Bucket) -> None:
    """Check that a bucket in a folder is mounted. Raises StoreUnavailable."""
    if isinstance(bucket, LocalStore) and not is_mounted(Path(str(bucket.prefix))):
        raise StoreUnavailable(f"{uri}: its bucket {bucket.prefix} is not there: mount it again")


@contextmanager
def translate_listing_errors(uri: str, bucket: Bucket) -> Iterator[None]:
    """Translate errors of listing a bucket's folders to StoreUnavailable.

    What is not found while the folder disappears is not known to be missing. Network folders report outages in many ways.
    """
    try:
        yield
    except OSError as error:
        raise StoreUnavailable(f"{uri}: {error.strerror}") from error
    require_mounted_bucket(uri, bucket)


@contextmanager
def translate_store_errors(uri: str, bucket: Bucket, *, writing: bool = False) -> Iterator[None]:
    """Translate the library's errors to missing, full, refused or unavailable.

    In a bucket whose folder is not mounted nothing counts as missing and nothing is written: the library would recreate the
    folder, which the mount would hide. A write during which the folder disappears counts as failed.
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
        raise FileNotFoundError(f"there is no object at {uri}") from None
    except BaseError as error:
        text = str(error)
        code = int(found.group(1)) if (found := OS_ERROR_CODE.search(text)) else None
        if code in STORAGE_FULL_ERRNOS:
            raise StoreFull(uri + NO_SPACE_SUFFIX) from None
        if code in (errno.ENOTDIR, errno.EISDIR) and not writing:  # a file where the key has a folder, or the reverse
            raise FileNotFoundError(f"there is no object at {uri}") from None
        raise unavailable_error(uri, text, bucket) from error


def unavailable_error(uri: str, error: str, bucket: Bucket) -> StoreUnavailable:
    """Build the error for the library's message, in one line."""
    if isinstance(bucket, LocalStore):
        return StoreUnavailable(f"{uri}: {error.splitlines()[0][:500]}")
    kind = StoreRefuses if is_denied(error) else StoreUnavailable
    return kind(f"{uri}: {explain_s3_error(error, str(bucket.config.get('endpoint')), str(bucket.config.get('bucket')))}")
