"""Buckets: folders in embedded mode, else on an S3 server; and what can go wrong with them, told apart.

With `recipes.storage.object_store` the only place that touches `obstore`.
"""

import errno
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

from obstore.exceptions import BaseError, PreconditionError
from obstore.store import LocalStore, S3Store

from recipes.addresses import local_root
from recipes.contracts.job import StoreAddress
from recipes.s3_answers import refuses, told
from recipes.storage.folder_bucket import away, is_there, make

Bucket: TypeAlias = LocalStore | S3Store
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
OS_ERROR = re.compile(r"os error (\d+)")


NO_SPACE = ": no space is left"


class StoreFull(Exception):
    """No space is left where the objects lie: the URI that had no room, and `NO_SPACE`."""


class StoreUnavailable(Exception):
    """The object store does not answer, or refuses what it was asked."""


class StoreRefuses(StoreUnavailable):
    """The keys are wrong or may not do this, or there is no such bucket: to wait for it does not help."""


class Replaced(FileNotFoundError):
    """What was being read is no more: another object lies at its place."""


def open_bucket(name: str, address: StoreAddress, variables: Mapping[str, str]) -> Bucket:
    """A bucket on the server of an address, or its folder. Every put asks for encryption at rest (row X1).

    And tells its checksum, as each part of a large one does: of what a wire, a proxy or a disk's buffer changed, the server
    then stores nothing. The library has it already, for the signature.

    Raises:
        StoreUnavailable: the folder was made once, and is not there.
        OSError: it cannot be made.
    """
    root = local_root(address)
    if root is not None:
        if not is_there(root / name) and (mark := away(address)):
            remedy = f"mount it again (or remove {mark}, and it is taken as it is)"
            raise StoreUnavailable(f"{root / mark.name} is not the bucket that it was: {remedy}")
        folder = make(root, name)
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


def refuse_without_bucket(uri: str, bucket: Bucket) -> None:
    """Raises StoreUnavailable: the bucket is a folder, and that is not there: not mounted any more, or moved away."""
    if isinstance(bucket, LocalStore) and not is_there(Path(str(bucket.prefix))):
        raise StoreUnavailable(f"{uri}: its bucket {bucket.prefix} is not there: mount it again")


@contextmanager
def listing(uri: str, bucket: Bucket) -> Iterator[None]:
    """Around a look into the folders of a bucket: what was not found while it went away is not known to be missing.

    A network folder says in many ways that it does not answer.
    """
    try:
        yield
    except OSError as error:
        raise StoreUnavailable(f"{uri}: {error.strerror}") from error
    refuse_without_bucket(uri, bucket)


@contextmanager
def readable_errors(uri: str, bucket: Bucket, *, writing: bool = False) -> Iterator[None]:
    """Turn what the library raises into what callers tell apart: missing, full, or no answer.

    Of a bucket whose folder went away nothing is missing, and nothing is written: the library would make it anew, where
    another lies as soon as it is mounted again. It does all the same where the folder goes just then: that is no success.
    """
    if writing:
        refuse_without_bucket(uri, bucket)
    try:
        yield
        if writing:
            refuse_without_bucket(uri, bucket)
    except PreconditionError:
        raise Replaced(f"{uri} was replaced while it was read") from None
    except FileNotFoundError as error:
        refuse_without_bucket(uri, bucket)
        if writing or refuses(str(error)):
            raise no_answer(uri, str(error), bucket) from None
        raise FileNotFoundError(f"nothing lies at {uri}") from None
    except BaseError as error:
        text = str(error)
        code = int(found.group(1)) if (found := OS_ERROR.search(text)) else None
        if code in FULL:
            raise StoreFull(uri + NO_SPACE) from None
        if code in (errno.ENOTDIR, errno.EISDIR) and not writing:  # a folder's name that is a file's, or the reverse
            raise FileNotFoundError(f"nothing lies at {uri}") from None
        raise no_answer(uri, text, bucket) from error


def no_answer(uri: str, error: str, bucket: Bucket) -> StoreUnavailable:
    """What the library said, in one line."""
    if isinstance(bucket, LocalStore):
        return StoreUnavailable(f"{uri}: {error.splitlines()[0][:500]}")
    kind = StoreRefuses if refuses(error) else StoreUnavailable
    return kind(f"{uri}: {told(error, str(bucket.config.get('endpoint')), str(bucket.config.get('bucket')))}")
