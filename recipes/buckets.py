"""Buckets: folders in embedded mode, else on an S3 server; and what can go wrong with them, told apart.

With `recipes.objects` the only place that touches `obstore`.
"""

import errno
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeAlias

from obstore.exceptions import BaseError, PreconditionError
from obstore.store import LocalStore, S3Store

from recipes.addresses import local_root
from recipes.schema import StoreAddress

Bucket: TypeAlias = LocalStore | S3Store
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
OS_ERROR = re.compile(r"os error (\d+)")


class StoreFull(Exception):
    """No space is left where the objects lie."""


class StoreUnavailable(Exception):
    """The object store does not answer, or refuses what it was asked."""


class Replaced(FileNotFoundError):
    """What was being read is no more: another object lies at its place."""


def open_bucket(name: str, address: StoreAddress, variables: Mapping[str, str]) -> Bucket:
    """A bucket on the server of an address, or its folder, which is made. Every put asks for encryption at rest (row X1).

    And tells its checksum, as each part of a large one does: of what a wire, a proxy or a disk's buffer changed, the server
    then stores nothing. The library has it already, for the signature.
    """
    root = local_root(address)
    if root is not None:
        return LocalStore(root / name, mkdir=True)
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


@contextmanager
def readable_errors(uri: str, *, writing: bool = False) -> Iterator[None]:
    """Turn what the library raises into what callers tell apart: missing, full, or no answer."""
    try:
        yield
    except PreconditionError:
        raise Replaced(f"{uri} was replaced while it was read") from None
    except FileNotFoundError as error:
        if writing or "NoSuchBucket" in str(error):
            raise StoreUnavailable(f"{uri}: its bucket does not exist") from None
        raise FileNotFoundError(f"nothing lies at {uri}") from None
    except BaseError as error:
        text = str(error)
        code = int(found.group(1)) if (found := OS_ERROR.search(text)) else None
        if code in FULL:
            raise StoreFull(f"{uri}: no space is left") from None
        if code in (errno.ENOTDIR, errno.EISDIR) and not writing:  # a folder's name that is a file's, or the reverse
            raise FileNotFoundError(f"nothing lies at {uri}") from None
        raise StoreUnavailable(f"{uri}: {text.splitlines()[0][:500]}") from error
