"""Create a dataset version: check and store its files, then commit its row."""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from recipes.contracts.dataset_formats import MixedSplits, is_hidden, refuse_mixed_split_folders
from recipes.records.record_index import build_index_manifest, index_uri
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact, Manifest
from resources.errors import invalid
from resources.ingest.formats import parse_format
from resources.ingest.new_version import NewVersion
from resources.ingest.record_writer import Content, check_and_store
from resources.ingest.source_files import FolderFiles, SourceFile, local_files
from resources.lineage.edges import record_artifact
from resources.metadata.database import Database
from resources.metadata.datasets import Datasets, DatasetVersion, dataset_folder, new_id
from resources.metadata.field_rules import checked_dataset_metadata, checked_dataset_name, checked_dataset_tags
from resources.metadata.outbox import now_ms
from resources.object_store.chunk_claims import ChunkClaims
from resources.object_store.chunk_upload import open_chunk_store

# Creates a dataset version: records are checked while source and records are stored, and the row is committed last.
#
# This is one pass with constant memory. If a problem is found, everything stored so far is removed, and a version exists
# only after its row is committed. So neither an error nor a kill leaves anything visible.


class VersionNumberConflict(Exception):
    """Another version took the number under which the manifests are stored."""


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
    """Create a version from the file or folder at `path` (see `create_from_files`)."""
    request = NewVersion(checked_dataset_name(name), format, user, organization, tags, metadata)
    return create_from_files(database, store, request, local_files(path, parse_format(format)))


@dataclass(frozen=True)
class Ingested:
    """The version of some files, and whether it is new.

    Equal content returns the existing version. `skipped` are the paths of files that were left out as hidden or without a
    record; `unread` counts the records that have a key inside messages or tools which no model reads.
    """

    version: DatasetVersion
    is_new: bool
    skipped: Sequence[str]
    unread: Mapping[str, int]


def create_from_files(
    database: Database, store: Store, request: NewVersion, files: Sequence[SourceFile]
) -> tuple[DatasetVersion, bool]:
    """Call `ingest_files`, and return the version and whether it is new."""
    made = ingest_files(database, store, request, files)
    return made.version, made.is_new


def ingest_files(database: Database, store: Store, request: NewVersion, files: Sequence[SourceFile]) -> Ingested:
    """Create a version from files.

    Raises:
        HanzoError: the name, the format, a file or a record is invalid; nothing was stored.
    """
    checked_dataset_name(request.name)
    checked_dataset_tags(request.tags)
    checked_dataset_metadata(request.metadata or {})
    format = parse_format(request.format)
    refuse_duplicate_names(files)
    files, left_out = leave_out_hidden(files)
    origins = tuple(file.origin for file in files if file.origin)
    place = dataset_folder(request.organization, request.name)
    claims = ChunkClaims(database, request.organization, place)
    claims.release_abandoned(store)
    holder = new_id()
    claims.open(holder)
    try:
        with open_chunk_store(store, claims, holder, place) as chunks:
            content = check_and_store(files, format, chunks)
        skipped = sorted([*left_out, *content.empty])
        version, is_new = Publication(database, store, claims, request, content, origins, skipped).commit(holder)
    except BaseException:
        claims.release(store, holder)
        raise
    if not is_new:
        claims.release(store, holder)
    return Ingested(version, is_new, skipped, content.unread)


def leave_out_hidden(files: Sequence[SourceFile]) -> tuple[Sequence[SourceFile], list[str]]:
    """Return the visible files, and the paths of hidden ones.

    Raises:
        HanzoError: 400 if they are of several splits.
    """
    skipped = list(files.skipped) if isinstance(files, FolderFiles) else []
    hidden = [file.path for file in files if is_hidden(file.path)]
    if len(files) > 1 and len(hidden) < len(files):
        files, skipped = [file for file in files if not is_hidden(file.path)], [*skipped, *hidden]
    if len(files) > 1:
        try:
            refuse_mixed_split_folders(file.path for file in files)
        except MixedSplits as mixed:
            command = shlex.join(["hanzo-ml", "dataset", "create", "--name", "NAME", "--path", mixed.first])
            raise invalid(f"this is not a dataset: {mixed.advice(command)}") from None
    return files, skipped


def refuse_duplicate_names(files: Sequence[SourceFile]) -> None:
    path, count = Counter(file.path for file in files).most_common(1)[0]
    if count > 1:
        raise invalid(f"{count} files are called '{path}': rename all but one")


@dataclass(frozen=True)
class Publication:
    """Publishes stored content as a version."""

    database: Database
    store: Store
    claims: ChunkClaims
    request: NewVersion
    content: Content
    origins: Sequence[str]
    skipped: Sequence[str] = ()

    def commit(self, holder: str) -> tuple[DatasetVersion, bool]:
        """Store the manifests under the next number, then the row, in one short transaction.

        The version's id is `holder`. If another version took the number meanwhile, the manifests are stored again under the
        next one, so that no transaction waits for the object store.
        """
        while (created := self._try(holder)) is None:
            pass
        return created

    def _try(self, holder: str) -> tuple[DatasetVersion, bool] | None:
        request, datasets = self.request, Datasets(self.database)
        with self.database.write() as connection:
            # Read the number first: a concurrent commit of this content is then found by the second query, or has taken the
            # number.
            number = datasets.next_number(connection, request.organization, request.name)
            if existing := datasets.find_by_content(connection, request.organization, request.name, self.content.sha256):
                return existing, False
            place = f"{dataset_folder(request.organization, request.name)}/{number}"
            own = f"{place}/{holder[:8]}"
            self.claims.keep_alive(connection, holder, own)
        source = self._source()
        raw = self.store.put_manifest(f"{own}/source", source)
        records = self._records(raw)
        artifact = self.store.put_manifest(f"{own}/records", records)
        self.store.put_manifest(index_uri(artifact.uri), build_index_manifest(artifact, (self.content.index,)))
        version = self._version(holder, number, place, raw, artifact)
        try:
            with self.database.write() as connection:
                if datasets.reserve_number(connection, request.organization, request.name) != number:
                    raise VersionNumberConflict
                self.claims.keep_alive(connection, holder, place)
                record_artifact(connection, raw, source)
                record_artifact(connection, artifact, records)
                datasets.add(connection, version)
        except VersionNumberConflict:
            self.store.delete(own)
            return None
        return version, True

    def _owner_facts(self) -> dict[str, JsonValue]:
        """Return facts that make equal content of two datasets two artifacts.

        So one can be deleted without the other.
        """
        return {"dataset": self.request.name, "organization": self.request.organization}

    def _source(self) -> Manifest:
        facts = {**self._owner_facts(), "format": self.request.format, **self._origin_facts()}
        return Manifest(kind="source", files=self.content.source, facts=facts)

    def _origin_facts(self) -> dict[str, JsonValue]:
        return {"origins": list(self.origins)} if self.origins else {}

    def _records(self, source: Artifact) -> Manifest:
        facts: dict[str, JsonValue] = {
            **self._owner_facts(),
            "num_records": self.content.num_records,
            "columns": {column: dict(kinds) for column, kinds in self.content.counts.items()},
            "transform": "canonical JSON lines",
        }
        return Manifest(kind="dataset", files=self.content.records, inputs={"source": source.digest}, facts=facts)

    def _version(self, id: str, number: int, place: str, raw: Artifact, artifact: Artifact) -> DatasetVersion:
        return DatasetVersion(
            id=id,
            name=self.request.name,
            version=number,
            organization=self.request.organization,
            created_at=now_ms(),
            created_by=self.request.user,
            storage_path=f"{place}/",
            format=self.request.format,
            size_bytes=raw.size_bytes,
            num_records=self.content.num_records,
            schema=self.content.schema,
            splits={},
            metadata=dict(self.request.metadata or {}),
            tags=list(self.request.tags),
            lineage={
                "parent_datasets": list(self.request.parents),
                "transform": self.request.transform,
                **self._origin_facts(),
                **({"skipped": list(self.skipped)} if self.skipped else {}),
                **({"unread": dict(sorted(self.content.unread.items()))} if self.content.unread else {}),
            },
            content_sha256=self.content.sha256,
            artifact=artifact,
        )
