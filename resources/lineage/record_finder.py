"""Find the dataset versions and splits that contain a record, or one made from it.

The search uses the indexes that were built with the versions; a split that consists of lines of its version uses that one's.
An artifact without an index is read completely, which takes long but misses nothing.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum

from recipes.records.fingerprint import Fingerprint
from recipes.records.record_index import IndexHit, RecordIndex, Segment, find_index, fingerprint_line, number_hits
from recipes.records.record_reader import iterate_record_lines
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact, FileRecord
from resources.lineage.edges import DATA_KINDS, child_edges
from resources.metadata.database import Database

READER_THREADS = 16


class Relation(StrEnum):
    """How a record that was found relates to the one that was searched."""

    SAME = "the same record"
    TEXT = "the same text"
    MADE_OF = "made of it"


@dataclass(frozen=True)
class Hit:
    """Record `number` (from 1) of an artifact."""

    number: int
    fingerprint: Fingerprint
    how: Relation


Hits = Mapping[str, Sequence[Hit]]
"""The records found in each artifact, by digest."""


class RecordFinder:
    """Finds records in dataset versions and everything made from them.

    Each index's manifest is read once.
    """

    def __init__(self, database: Database, store: Store, versions: Sequence[Artifact]) -> None:
        self._database = database
        self._store = store
        self._versions = versions
        self._indexes: dict[str, RecordIndex | None] = {}
        with ThreadPoolExecutor(READER_THREADS) as pool:
            list(pool.map(self._index, versions))

    def find(self, wanted: Fingerprint) -> Hits:
        """Return all artifacts that contain the record, its text, or a derived record."""
        hits = self._search_versions(wanted)
        waiting = set(hits)
        while waiting:
            with self._database.read() as connection:
                edges = [edge for edge in child_edges(connection, waiting) if edge.child.kind in DATA_KINDS]
            waiting = set()
            for edge in edges:
                known = {hit.number: hit for hit in hits.get(edge.child.digest, ())}
                more = {hit.number: hit for hit in self._search_child(edge.child, hits[edge.parent], wanted)} | known
                if len(more) > len(known):
                    hits[edge.child.digest] = sorted(more.values(), key=lambda hit: hit.number)
                    waiting.add(edge.child.digest)
        return hits

    def _search_versions(self, wanted: Fingerprint) -> dict[str, Sequence[Hit]]:
        indexed = {version.digest: index for version in self._versions if (index := self._index(version))}
        found = self._query_segments((segment for index in indexed.values() for segment in index.records), {wanted.text})
        hits: dict[str, Sequence[Hit]] = {}
        for version in self._versions:
            index = indexed.get(version.digest)
            entries = number_hits(index.records, found) if index else self._scan_records(version, {wanted.text})
            if here := [Hit(entry.number, Fingerprint(entry.value, entry.key), relate(entry, wanted)) for entry in entries]:
                hits[version.digest] = here
        return hits

    def _search_child(self, child: Artifact, parents: Sequence[Hit], wanted: Fingerprint) -> Iterator[Hit]:
        """Yield an artifact's records that equal, or were made from, its parent's hits."""
        if child.kind == "split" and (selections := self._selections(child)):
            yield from self._selected(child, selections, parents)
            return
        texts = {wanted.text, *(hit.fingerprint.text for hit in parents)}
        known = {hit.fingerprint.record for hit in parents}
        index = self._index(child)
        own: dict[int, IndexHit] = {}
        if index is None:
            entries = self._scan_records(child, texts)
        else:
            own = {entry.number: entry for entry in self._find(index.origins, known)}
            entries = self._find(index.records, texts | {entry.value for entry in own.values()})
        for entry in entries:
            found = Fingerprint(entry.value, entry.key)
            if entry.key == wanted.text:
                yield Hit(entry.number, found, relate(entry, wanted))
            elif entry.value in known or entry.number in own:
                yield Hit(entry.number, found, Relation.MADE_OF)

    def _selections(self, split: Artifact) -> list[FileRecord]:
        """Return the files of a split that consist of lines of its version.

        They need no index of their own.
        """
        return [file for file in self._store.manifest(split).files if file.selection]

    def _selected(self, split: Artifact, files: Sequence[FileRecord], parents: Sequence[Hit]) -> Iterator[Hit]:
        """Yield the version's records that are in its split, with their numbers in the split."""
        before = 0
        for file in files:
            selection = file.selection
            assert selection is not None
            last = selection.before + selection.records
            if here := [hit for hit in parents if selection.before < hit.number <= last]:
                marks = self._store.read_line_mask(split.uri, file, selection)
                for hit in here:
                    place = hit.number - selection.before
                    if marks[place - 1]:
                        yield replace(hit, number=before + int(marks[:place].sum()))
            before += selection.chosen

    def _find(self, segments: Sequence[Segment], keys: Collection[int]) -> Iterator[IndexHit]:
        return number_hits(segments, self._query_segments(segments, keys))

    def _query_segments(self, segments: Iterable[Segment], keys: Collection[int]) -> Mapping[Segment, Sequence[IndexHit]]:
        """Query each segment once, however many versions share it."""
        distinct = list(dict.fromkeys(segments))
        with ThreadPoolExecutor(READER_THREADS) as pool:
            found = pool.map(lambda segment: segment.find(self._store, keys), distinct)
            return dict(zip(distinct, found, strict=True))

    def _scan_records(self, artifact: Artifact, texts: Collection[int]) -> Iterator[IndexHit]:
        """Yield what an index would return, by reading the records."""
        for number, line in enumerate(iterate_record_lines(self._store, artifact), start=1):
            found = fingerprint_line(line)
            if found.text in texts:
                yield IndexHit(found.text, found.record, number)

    def _index(self, artifact: Artifact) -> RecordIndex | None:
        if artifact.digest not in self._indexes:
            self._indexes[artifact.digest] = find_index(self._store, artifact)
        return self._indexes[artifact.digest]


def relate(entry: IndexHit, wanted: Fingerprint) -> Relation:
    """Return how a record with the wanted text relates to the wanted record."""
    return Relation.SAME if entry.value == wanted.record else Relation.TEXT
