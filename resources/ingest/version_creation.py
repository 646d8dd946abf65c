"""A dataset version: every record is checked while source and records are stored, and the version appears last of all.

One pass, in which memory stays flat: whatever is stored until something is found wrong is removed again, and a version
exists from the moment on in which its row is committed. So neither a refusal nor a kill leaves anything that can be seen.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from recipes.record_index import index_manifest, index_uri
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact, Manifest
from resources.errors import invalid
from resources.ingest.formats import format_of
from resources.ingest.new_version import NewVersion
from resources.ingest.place import dataset_folder
from resources.ingest.record_writer import Content, read_all
from resources.ingest.source_files import SourceFile, local_files
from resources.lineage.record import record
from resources.metadata.database import Database
from resources.metadata.datasets import Datasets, DatasetVersion, new_id
from resources.metadata.field_rules import checked_metadata, checked_name, checked_tags
from resources.metadata.outbox import now_ms
from resources.object_store.chunk_claims import ChunkClaims
from resources.object_store.chunk_upload import chunk_store


class NumberTaken(Exception):
    """Another version took the number under which the manifests lie."""


def create_version(
    database: Database,
    store: Store,
    *,
    name: str,
    path: Path,
    format: str = "jsonl",
    user: str,
    organization: str,
    tags: Sequence[str] = (),
    metadata: Mapping[str, JsonValue] | None = None,
) -> tuple[DatasetVersion, bool]:
    """Make a version of the file or folder at `path`: `create_from`."""
    wanted = NewVersion(checked_name(name), format, user, organization, tags, metadata)
    return create_from(database, store, wanted, local_files(path, format_of(format)))


def create_from(
    database: Database, store: Store, wanted: NewVersion, files: Sequence[SourceFile]
) -> tuple[DatasetVersion, bool]:
    """Make a version of files. Returns it, and whether it is new: equal content is the version it was.

    Raises:
        HanzoError: bad name, format, file or record; nothing was stored.
    """
    checked_name(wanted.name)
    checked_tags(wanted.tags)
    checked_metadata(wanted.metadata or {})
    format = format_of(wanted.format)
    refuse_doubles(files)
    origins = tuple(file.origin for file in files if file.origin)
    place = dataset_folder(wanted.organization, wanted.name)
    claims = ChunkClaims(database, wanted.organization, place)
    claims.release_dead(store)
    holder = new_id()
    claims.open(holder)
    try:
        with chunk_store(store, claims, holder, place) as chunks:
            content = read_all(files, format, chunks)
        version, is_new = Publication(database, store, claims, wanted, content, origins).commit(holder)
    except BaseException:
        claims.release(store, holder)
        raise
    if not is_new:
        claims.release(store, holder)
    return version, is_new


def refuse_doubles(files: Sequence[SourceFile]) -> None:
    path, count = Counter(file.path for file in files).most_common(1)[0]
    if count > 1:
        raise invalid(f"{count} files are called '{path}': rename all but one")


@dataclass(frozen=True)
class Publication:
    """Content that is in the store becomes a version."""

    database: Database
    store: Store
    claims: ChunkClaims
    wanted: NewVersion
    content: Content
    origins: Sequence[str]

    def commit(self, holder: str) -> tuple[DatasetVersion, bool]:
        """Manifests under the next number, then the row, in one short transaction. The id of the version is `holder`.

        Where another took the number meanwhile, the manifests are written again under the next one: nobody waits for the
        object store while he holds the database.
        """
        while (made := self._try(holder)) is None:
            pass
        return made

    def _try(self, holder: str) -> tuple[DatasetVersion, bool] | None:
        wanted, datasets = self.wanted, Datasets(self.database)
        with self.database.write() as connection:
            # The number first: whoever commits this content between the two is found by the second, or has taken the number.
            number = datasets.next_number(connection, wanted.organization, wanted.name)
            if existing := datasets.with_content(connection, wanted.organization, wanted.name, self.content.sha256):
                return existing, False
            place = f"{dataset_folder(wanted.organization, wanted.name)}/{number}"
            own = f"{place}/{holder[:8]}"
            self.claims.keep_alive(connection, holder, own)
        source = self._source()
        raw = self.store.put_manifest(f"{own}/source", source)
        records = self._records(raw)
        artifact = self.store.put_manifest(f"{own}/records", records)
        self.store.put_manifest(index_uri(artifact.uri), index_manifest(artifact, (self.content.index,)))
        version = self._version(holder, number, place, raw, artifact)
        try:
            with self.database.write() as connection:
                if datasets.take_number(connection, wanted.organization, wanted.name) != number:
                    raise NumberTaken
                self.claims.keep_alive(connection, holder, place)
                record(connection, raw, source)
                record(connection, artifact, records)
                datasets.add(connection, version)
        except NumberTaken:
            self.store.delete(own)
            return None
        return version, True

    def _whose(self) -> dict[str, JsonValue]:
        """Makes equal content of two datasets two artifacts, of which one can be deleted."""
        return {"dataset": self.wanted.name, "organization": self.wanted.organization}

    def _source(self) -> Manifest:
        facts = {**self._whose(), "format": self.wanted.format, **self._whence()}
        return Manifest(kind="source", files=self.content.source, facts=facts)

    def _whence(self) -> dict[str, JsonValue]:
        return {"origins": list(self.origins)} if self.origins else {}

    def _records(self, source: Artifact) -> Manifest:
        facts: dict[str, JsonValue] = {
            **self._whose(),
            "num_records": self.content.num_records,
            "columns": {column: dict(kinds) for column, kinds in self.content.counts.items()},
            "transform": "canonical JSON lines",
        }
        return Manifest(kind="dataset", files=self.content.records, inputs={"source": source.digest}, facts=facts)

    def _version(self, id: str, number: int, place: str, raw: Artifact, artifact: Artifact) -> DatasetVersion:
        return DatasetVersion(
            id=id,
            name=self.wanted.name,
            version=number,
            organization=self.wanted.organization,
            created_at=now_ms(),
            created_by=self.wanted.user,
            storage_path=f"{place}/",
            format=self.wanted.format,
            size_bytes=raw.size_bytes,
            num_records=self.content.num_records,
            schema=self.content.schema,
            splits={},
            metadata=dict(self.wanted.metadata or {}),
            tags=list(self.wanted.tags),
            lineage={
                "parent_datasets": list(self.wanted.parents),
                "transform": self.wanted.transform,
                **self._whence(),
            },
            content_sha256=self.content.sha256,
            artifact=artifact,
        )
