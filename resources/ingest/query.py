"""The rows of a query as a raw file: JSON lines, the same ones that the command line makes of a database that it reads.

The operator says where a database is, and as whom it is asked (`storage.databases`); whoever asks knows its name alone. So
nobody has this server call an address, open a file or use a password of its own, and no refusal shows one.
"""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from recipes.contracts.dataset_formats import Format
from recipes.records.sql_query import BadQuery, NoConnection, query_lines
from resources.errors import ErrorCode, HanzoError, invalid
from resources.ingest.source_files import SourceFile
from resources.settings.sections import AskedDatabase
from resources.settings.settings import Settings

log = logging.getLogger(__name__)

FILE = "query.jsonl"


def allowed_query(settings: Settings, name: str, statement: str, format: Format, organization: str) -> SourceFile:
    """`query_file` for a query that came over HTTP.

    Raises:
        HanzoError: 403 where the database is not the organization's to ask; whether there is one of that name is not told.
    """
    found = settings.storage.databases.get(name)
    if found is None or organization not in found.organizations:
        raise HanzoError(
            ErrorCode.PERMISSION_DENIED,
            f"this server asks no database called {name[:100]!r} for your organization: upload the rows, or have its "
            "operator add it to storage.databases",
        )
    return query_file(settings, name, statement, format)


def query_file(settings: Settings, name: str, statement: str, format: Format) -> SourceFile:
    """The rows of a statement, asked for when the file is opened."""
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

    return SourceFile(FILE, opened, origin=f"sql://{name}?{statement}")


def write_rows(name: str, database: AskedDatabase, statement: str, file: BinaryIO) -> None:
    """Raises HanzoError in words that tell nothing of where the database is."""
    try:
        for block in query_lines(database.url.get_secret_value(), statement, database.seconds):
            file.write(block)
    except NoConnection as problem:
        log.warning("database %s cannot be asked: %s", name, problem)
        message = f"database {name!r} cannot be reached: try again later, or have this server's operator look at its log"
        raise HanzoError(ErrorCode.TEMPORARILY_UNAVAILABLE, message) from None
    except BadQuery as problem:
        raise invalid(f"the rows of database {name!r} cannot be read: {problem}") from None
