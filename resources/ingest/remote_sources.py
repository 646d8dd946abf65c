"""Raw files at an address: `file://`, `s3://` of any bucket that the server's own keys may read, or `kafka://` (row B12).

Over HTTP only what the operator allows (`storage.import_from`): or whoever may create a dataset could read the server's own
disk, and other organizations' buckets, by it.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

import obstore

from recipes.contracts.dataset_formats import ENDINGS, Format, has_format
from recipes.contracts.job import StoreAddress
from recipes.storage.buckets import open_bucket, readable_errors
from resources.errors import ErrorCode, HanzoError, invalid
from resources.ingest.kafka_address import SCHEME, is_granted, read_topic_address
from resources.ingest.source_files import SourceFile, local_files
from resources.settings.settings import Settings

AWS = "https://s3.amazonaws.com"
CHUNK = 4 << 20


def is_address(text: str) -> bool:
    return text.startswith(("s3://", "file://", SCHEME))


def allowed_files(settings: Settings, address: str, format: Format) -> list[SourceFile]:
    """`files_at` for an address that came over HTTP.

    Raises:
        HanzoError: 403 where it is not below one of `storage.import_from`.
    """
    if not is_address(address):
        raise invalid(
            f"{address[:100]!r} is no address that this server can fetch: give one that begins with s3://, file:// or "
            "kafka://"
        )
    if not is_allowed(address, settings.storage.import_from) or is_our_own(settings, address):
        message = "This server fetches nothing from there: upload the files, or have its operator add storage.import_from"
        raise HanzoError(ErrorCode.PERMISSION_DENIED, message)
    return files_at(settings, address, format)


def is_allowed(address: str, allowed: Sequence[str]) -> bool:
    if address.startswith(SCHEME):
        return is_granted(read_topic_address(address), allowed)
    return any(lies_below(address, each) for each in allowed)


def is_our_own(settings: Settings, address: str) -> bool:
    """Whether an address is where this server keeps what it stores, or tells what happens, which is of all organizations.

    A topic is known by its name: the same brokers have many.
    """
    if address.startswith(SCHEME):
        return read_topic_address(address).topic.startswith(f"{settings.stream.topic_prefix}.")
    if address.startswith("file://"):
        place = path_of(address).resolve()
        return place.is_relative_to(settings.home) or settings.home.is_relative_to(place)
    return address.removeprefix("s3://").partition("/")[0] in settings.store.buckets.values()


def lies_below(address: str, allowed: str) -> bool:
    """Whether an address is the allowed one or below it, links and `..` resolved."""
    if address.startswith("file://") and allowed.startswith("file://"):
        return path_of(address).resolve().is_relative_to(path_of(allowed).resolve())
    if ".." in address.split("/"):
        return False
    return address.startswith("s3://") and (address == allowed or address.startswith(allowed.rstrip("/") + "/"))


def files_at(settings: Settings, address: str, format: Format) -> list[SourceFile]:
    """The files at an address: one file, or all of the format below it.

    Raises:
        HanzoError: there is none.
    """
    if address.startswith("file://"):
        root = path_of(address).resolve()
        found = local_files(root, format)
        # A link in an allowed folder must not lead out of it.
        if any(not (root / file.path).resolve().is_relative_to(root) for file in found if root.is_dir()):
            raise invalid("the folder holds links to files outside of it: copy them there")
        return found
    if address.startswith(SCHEME):
        return [messages_at(settings, address, format)]
    bucket_name, _, key = address.removeprefix("s3://").partition("/")
    if not bucket_name:
        raise invalid(f"{address} names no bucket: write s3://BUCKET/KEY")
    root_address = StoreAddress(root=settings.storage.endpoint or AWS, buckets={}, encryption="none")
    bucket = open_bucket(bucket_name, root_address, settings.storage.variables)
    key = key.strip("/")
    with readable_errors(address, bucket):
        keys = sorted(meta["path"] for batch in obstore.list(bucket, prefix=key or None) for meta in batch)
    if key and is_object(bucket, key, address):
        return [SourceFile(key.rpartition("/")[2], download(bucket, key, address))]
    found_keys = [each for each in keys if has_format(each, format)]
    if not found_keys:
        raise invalid(f"there is no *{ENDINGS[format][0]} file at {address}")
    prefix = f"{key}/" if key else ""
    return [SourceFile(each.removeprefix(prefix), download(bucket, each, address)) for each in found_keys]


def messages_at(settings: Settings, address: str, format: Format) -> SourceFile:
    from resources.ingest.kafka_topic import topic_file  # librdkafka: few ask for it, and a server's start need not wait

    if format is not Format.JSONL:
        raise invalid(f"a topic's messages are read as jsonl, and not as {format}: leave the format out")
    return topic_file(read_topic_address(address), settings.stream.security)


def is_object(bucket: "obstore.store.ObjectStore", key: str, uri: str) -> bool:
    try:
        with readable_errors(uri, bucket):
            obstore.head(bucket, key)
    except FileNotFoundError:
        return False
    return True


def path_of(address: str) -> Path:
    return Path(unquote(urlsplit(address).path))


def download(bucket: "obstore.store.ObjectStore", key: str, uri: str) -> Callable[[], AbstractContextManager[BinaryIO]]:
    """Opens an object as a file of this machine: parquet is read from its end.

    CSV is opened, and so fetched, twice: this way the disk need not hold all files at once.
    """

    @contextmanager
    def opened() -> Iterator[BinaryIO]:
        with tempfile.TemporaryFile() as file:
            try:
                with readable_errors(uri, bucket):
                    for chunk in obstore.get(bucket, key).stream(min_chunk_size=CHUNK):
                        file.write(chunk)
            except FileNotFoundError as problem:  # it was there as the files were listed
                raise invalid(f"{problem}: leave the files as they are until their version is made") from None
            file.seek(0)
            yield file

    return opened
