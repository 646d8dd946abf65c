"""Raw files at a remote address (file, S3, Kafka), or from a database query."""

import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

import obstore

from recipes.contracts.dataset_formats import ENDINGS, JSON_ENDING, Format, has_format
from recipes.contracts.job import StoreAddress
from recipes.records.sql_query import BadQuery, ConnectionRefused, iterate_query_lines
from recipes.storage.buckets import open_bucket, translate_store_errors
from resources.errors import ErrorCode, HanzoError, invalid
from resources.ingest.kafka_address import KAFKA_SCHEME, is_topic_allowed, parse_topic_address
from resources.ingest.source_files import FolderFiles, SourceFile, local_files, select_source_files
from resources.settings.sections import QueryDatabase
from resources.settings.settings import Settings

# The rows of a query as a raw file of JSON lines, equal to those that the command line produces from a database.
#
# The operator configures the database's address and user (`storage.databases`); the requester only knows its name. So users
# cannot make this server connect to an address, open a file or use a password of theirs, and no error message shows one.

log = logging.getLogger(__name__)

QUERY_FILE_NAME = "query.jsonl"


def allowed_query_source(settings: Settings, name: str, statement: str, format: Format, organization: str) -> SourceFile:
    """Return `query_source` for a query that came over HTTP.

    Raises:
        HanzoError: 403 if the organization may not query the database. The message does not reveal whether it exists.
    """
    found = settings.storage.databases.get(name)
    if found is None or organization not in found.organizations:
        raise HanzoError(
            ErrorCode.PERMISSION_DENIED,
            f"this server asks no database called {name[:100]!r} for your organization: upload the rows, or have its "
            "operator add it to storage.databases",
        )
    return query_source(settings, name, statement, format)


def query_source(settings: Settings, name: str, statement: str, format: Format) -> SourceFile:
    """Return the rows of a statement, which runs when the file is opened."""
    if format is not Format.JSONL:
        raise invalid(f"the rows of a query are read as jsonl, and not as {format}: leave the format out")
    database = settings.storage.databases.get(name)
    if database is None:
        raise invalid(f"no database is called {name[:100]!r}: name it, with its url, in storage.databases of the settings")

    @contextmanager
    def opened() -> Iterator[BinaryIO]:
        with tempfile.TemporaryFile() as file:
            write_rows(name, database, statement, file)
            file.seek(0)
            yield file

    return SourceFile(QUERY_FILE_NAME, opened, origin=f"sql://{name}?{statement}")


def write_rows(name: str, database: QueryDatabase, statement: str, file: BinaryIO) -> None:
    """Write the rows. Raises HanzoError, with messages that do not reveal the database's address."""
    try:
        for block in iterate_query_lines(database.url.get_secret_value(), statement, database.seconds):
            file.write(block)
    except ConnectionRefused as problem:
        log.warning("database %s cannot be queried: %s", name, problem)
        message = f"database {name!r} cannot be reached: try again later, or ask this server's operator to check its log"
        raise HanzoError(ErrorCode.TEMPORARILY_UNAVAILABLE, message) from None
    except BadQuery as problem:
        raise invalid(f"the rows of database {name!r} cannot be read: {problem}") from None


# Raw files at an address: `file://`, `s3://` of any bucket that the server's own keys can read, or `kafka://`.
#
# Over HTTP, only addresses that the operator allows (`storage.import_from`): otherwise anyone who may create a dataset could
# read the server's own disk, and other organizations' buckets.

AWS_ENDPOINT = "https://s3.amazonaws.com"
DOWNLOAD_CHUNK_BYTES = 4 << 20


def is_address(text: str) -> bool:
    return text.startswith(("s3://", "file://", KAFKA_SCHEME))


def allowed_files(settings: Settings, address: str, format: Format) -> list[SourceFile]:
    """Return `list_files` for an address that came over HTTP.

    Raises:
        HanzoError: 403 if it is not below one of `storage.import_from`.
    """
    if not is_address(address):
        raise invalid(
            f"{address[:100]!r} is not an address that this server can fetch: give one that begins with s3://, file:// or "
            "kafka://"
        )
    if not is_allowed(address, settings.storage.import_from) or is_own_storage(settings, address):
        message = "This server fetches nothing from there: upload the files, or have its operator add storage.import_from"
        raise HanzoError(ErrorCode.PERMISSION_DENIED, message)
    return list_files(settings, address, format)


def is_allowed(address: str, allowed: Sequence[str]) -> bool:
    if address.startswith(KAFKA_SCHEME):
        return is_topic_allowed(parse_topic_address(address), allowed)
    return any(is_below(address, each) for each in allowed)


def is_own_storage(settings: Settings, address: str) -> bool:
    """Return whether an address is in this server's own storage or event topics.

    Both contain data of all organizations.

    A topic is identified by its name alone: the same brokers may have many addresses.
    """
    if address.startswith(KAFKA_SCHEME):
        return parse_topic_address(address).topic.startswith(f"{settings.stream.topic_prefix}.")
    if address.startswith("file://"):
        place = file_path(address).resolve()
        return place.is_relative_to(settings.home) or settings.home.is_relative_to(place)
    return address.removeprefix("s3://").partition("/")[0] in settings.store.buckets.values()


def is_below(address: str, allowed: str) -> bool:
    """Return whether an address is the allowed one or below it.

    Links and `..` are resolved first.
    """
    if address.startswith("file://") and allowed.startswith("file://"):
        return file_path(address).resolve().is_relative_to(file_path(allowed).resolve())
    if ".." in address.split("/"):
        return False
    return address.startswith("s3://") and (address == allowed or address.startswith(allowed.rstrip("/") + "/"))


def list_files(settings: Settings, address: str, format: Format) -> list[SourceFile]:
    """Return the file at an address, or all files of the format below it.

    Raises:
        HanzoError: there are none.
    """
    if address.startswith("file://"):
        root = file_path(address).resolve()
        found = local_files(root, format)
        # A link in an allowed folder must not lead out of it.
        if any(not (root / file.path).resolve().is_relative_to(root) for file in found if root.is_dir()):
            raise invalid("the folder holds links to files outside of it: copy them there")
        return found
    if address.startswith(KAFKA_SCHEME):
        return [open_topic_source(settings, address, format)]
    bucket_name, _, key = address.removeprefix("s3://").partition("/")
    if not bucket_name:
        raise invalid(f"{address} names no bucket: write s3://BUCKET/KEY")
    root_address = StoreAddress(root=settings.storage.endpoint or AWS_ENDPOINT, buckets={}, encryption="none")
    bucket = open_bucket(bucket_name, root_address, settings.storage.variables)
    key = key.strip("/")
    with translate_store_errors(address, bucket):
        keys = sorted(meta["path"] for batch in obstore.list(bucket, prefix=key or None) for meta in batch)
    if key and is_object(bucket, key, address):
        return [SourceFile(key.rpartition("/")[2], object_opener(bucket, key, address))]
    prefix = f"{key}/" if key else ""
    within = [each.removeprefix(prefix) for each in keys]
    if not any(has_format(each, format) or each.endswith(JSON_ENDING) for each in within):
        raise invalid(f"there is no *{ENDINGS[format][0]} file at {address}")
    selected = select_source_files(within, format, address.rstrip("/"))
    files = (SourceFile(each, object_opener(bucket, f"{prefix}{each}", address)) for each in selected.chosen)
    return FolderFiles(files, selected.skipped)


def open_topic_source(settings: Settings, address: str, format: Format) -> SourceFile:
    # imported late, because librdkafka is rarely needed and slows down the start
    from resources.ingest.kafka_topic import topic_source

    if format is not Format.JSONL:
        raise invalid(f"a topic's messages are read as jsonl, and not as {format}: leave the format out")
    return topic_source(parse_topic_address(address), settings.stream.security)


def is_object(bucket: "obstore.store.ObjectStore", key: str, uri: str) -> bool:
    try:
        with translate_store_errors(uri, bucket):
            obstore.head(bucket, key)
    except FileNotFoundError:
        return False
    return True


def file_path(address: str) -> Path:
    return Path(unquote(urlsplit(address).path))


def object_opener(bucket: "obstore.store.ObjectStore", key: str, uri: str) -> Callable[[], AbstractContextManager[BinaryIO]]:
    """Return a function that opens an object as a local file.

    A local file is needed because Parquet is read from its end.

    CSV is opened, and so downloaded, twice: this way the disk need not hold all files at once.
    """

    @contextmanager
    def opened() -> Iterator[BinaryIO]:
        with tempfile.TemporaryFile() as file:
            try:
                with translate_store_errors(uri, bucket):
                    for chunk in obstore.get(bucket, key).stream(min_chunk_size=DOWNLOAD_CHUNK_BYTES):
                        file.write(chunk)
            except FileNotFoundError as problem:  # it existed when the files were listed
                raise invalid(f"{problem}: leave the files as they are until their version is made") from None
            file.seek(0)
            yield file

    return opened
