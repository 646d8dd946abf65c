"""Store, list, restore and delete snapshots of a command's checkpoints."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from recipes.runner import log_line
from recipes.storage.artifact_store import BrokenArtifact, Store
from recipes.storage.buckets import StoreUnavailable
from recipes.storage.folder_tree import put_times, read_times, remove_tree, write_tree
from recipes.storage.manifest import Artifact, Manifest

SNAPSHOT_NAME = re.compile(r"state-(\d+)-[0-9a-f]{12}")
"""The number and part of the digest: if two machines both believe the other dead, they never write to the same folder."""


@dataclass
class SnapshotStore:
    """The snapshots of one job, below `location`.

    Args:
        keep_last: how many of the newest snapshots are kept.
    """

    store: Store
    location: str
    keep_last: int
    _uploaded: dict[str, str] = field(default_factory=dict)
    """URIs of files that this process uploaded, by SHA-256: unchanged files are not uploaded again.

    The contents of other processes' uploads are unknown: a damaged object was once copied into the next snapshot under the
    SHA-256 of a good one.
    """
    _verified: set[str] = field(default_factory=set)
    """URIs of snapshots that this process made or has read."""

    def newest(self) -> Artifact | None:
        """Return the newest snapshot that has a manifest."""
        return next(iter(self._list_snapshots()), None)

    def restore_newest(self, cache: Path, target: Path) -> Artifact | None:
        """Restore the newest complete snapshot to `target` and return it, or None.

        Broken ones are deleted. Checkpoints from before there were snapshots are stored at `location` itself.
        """
        legacy = self.store.find(self.location)
        for state in [*self._list_snapshots(), *([legacy] if legacy else [])]:
            whole = target.with_name(f".{target.name}.tmp")  # so that a kill leaves no partial folder for the command
            remove_tree(whole)
            try:
                copy_artifact_files(self.store, state, self.store.fetch(state, cache), whole)
            except BrokenArtifact as problem:
                log_line(f"checkpoints: the command starts without those at {state.uri}, which are incomplete: {problem}")
                if state is not legacy:
                    self.delete(state.uri)
                continue
            whole.replace(target)
            return state
        return None

    def put_snapshot(
        self, folder: Path, manifest: Manifest, on_upload: Callable[[str], None], times: Mapping[str, int] | None = None
    ) -> Artifact:
        """Store a snapshot, unless the newest is identical.

        `on_upload` is called with the path of each uploaded file, and may raise.

        Args:
            times: modification times by path, in nanoseconds. They replace those of an identical snapshot.
        """
        newest = self.newest()
        if newest and newest.digest == manifest.digest and self._is_intact(newest, manifest, on_upload):
            if times:
                self.put_times(newest.uri.rpartition("/")[2], times)
            return newest
        name = self.next_name(manifest.digest)
        uri = f"{self.location}/{name}"
        self.upload_files(uri, folder, manifest, on_upload)
        if times:
            self.put_times(name, times)
        return self.complete(name, manifest)

    def put_times(self, name: str, times: Mapping[str, int], rank: int = 0) -> None:
        """Store the times of a snapshot's files, or of a node's part."""
        uri = index_uri(f"{self.location}/{name}", rank)
        if read_times(self.store, uri) != times:
            put_times(self.store, uri, times)

    def next_name(self, digest: str) -> str:
        """Return the name for the next snapshot.

        `digest` distinguishes it from another machine's of the same number.
        """
        return f"state-{max(self._snapshot_numbers().values(), default=0) + 1}-{digest[:12]}"

    def upload_files(self, uri: str, folder: Path, manifest: Manifest, on_upload: Callable[[str], None]) -> None:
        """Upload the files of a snapshot, or of a node's part, without a manifest."""
        for file in manifest.files:
            file_uri = f"{uri}/{file.object_path}"
            if not self._copy_existing(file.sha256, file_uri):
                self.store.put_file(file_uri, folder / file.path)
            self._uploaded[file.sha256] = file_uri
            on_upload(file.path)

    def complete(self, name: str, manifest: Manifest) -> Artifact:
        """Write the manifest for files that were uploaded, and delete old snapshots."""
        made = self.store.put_manifest(f"{self.location}/{name}", manifest)
        self._verified.add(made.uri)
        found = SNAPSHOT_NAME.fullmatch(name)
        assert found is not None
        self._remove_old(int(found[1]))
        return made

    def remove_incomplete(self, *, keep_newest: bool) -> None:
        """Delete snapshots without a manifest.

        A retry need not upload the files of the newest again.
        """
        numbers = self._snapshot_numbers()
        whole = {state.uri for state in self._list_snapshots()}
        incomplete = sorted((uri for uri in numbers if uri not in whole), key=lambda uri: numbers[uri])
        for uri in incomplete[:-1] if keep_newest else incomplete:
            self.delete(uri)

    def free_space(self) -> None:
        """Delete all but the newest complete snapshot, also those that `keep_last` would keep."""
        newest = self.newest()
        for uri in self._snapshot_numbers():
            if newest is None or uri != newest.uri:
                self.delete(uri)

    def _is_intact(self, state: Artifact, manifest: Manifest, on_upload: Callable[[str], None]) -> bool:
        """Return whether each file has the bytes that the manifest states.

        Another process's snapshot is read once.
        """
        if state.uri in self._verified:
            return True
        for file in manifest.files:
            try:
                if self.store.sha256(f"{state.uri}/{file.object_path}") != file.sha256:
                    return False
            except FileNotFoundError:
                return False
            on_upload(file.path)
        self._verified.add(state.uri)
        return True

    def _copy_existing(self, sha256: str, file_uri: str) -> bool:
        """Copy a file that is already in the store; return whether that was possible.

        S3 copies no more than 5 GB at once. In a local store a copy would be a link, and snapshots that share a file would
        share its damage, leaving no older intact one.
        """
        if sha256 not in self._uploaded or self.store.local_path(file_uri) is not None:
            return False
        try:
            self.store.copy(self._uploaded[sha256], file_uri)
        except (FileNotFoundError, StoreUnavailable):
            return False
        return True

    def _list_snapshots(self) -> list[Artifact]:
        """Return the snapshots that have a manifest, newest first."""
        numbers = self._snapshot_numbers()
        found = (self.store.find(uri) for uri in sorted(numbers, key=lambda uri: (-numbers[uri], uri)))
        return [state for state in found if state]

    def _snapshot_numbers(self) -> dict[str, int]:
        """Return the numbers of all snapshot folders by URI, including those without a manifest."""
        names = {uri.removeprefix(f"{self.location}/").partition("/")[0] for uri in self.store.list(self.location)}
        return {f"{self.location}/{name}": int(found[1]) for name in names if (found := SNAPSHOT_NAME.fullmatch(name))}

    def delete(self, uri: str) -> None:
        """Delete a snapshot, then its times."""
        self.store.delete(uri)
        for entry in self.store.list(snapshot_index_uri(uri)):
            self.store.remove(entry)

    def _remove_old(self, newest: int) -> None:
        """Delete the snapshots that are not kept, and incomplete ones older than the newest."""
        retained = {state.uri for state in self._list_snapshots()[: self.keep_last]}
        for uri, number in self._snapshot_numbers().items():
            if number < newest and uri not in retained:
                self.delete(uri)


def snapshot_index_uri(state_uri: str) -> str:
    """Return the folder of a snapshot's index, next to that of all snapshots."""
    location, _, name = state_uri.rpartition("/")
    return f"{location}.index/{name}"


def index_uri(state_uri: str, rank: int) -> str:
    """Return the index of one node's part."""
    return f"{snapshot_index_uri(state_uri)}/node-{rank}"


def read_snapshot_times(store: Store, state_uri: str, rank: int) -> dict[str, int]:
    """Return the times of a node's files in a snapshot.

    Empty for checkpoints from before there were snapshots.
    """
    is_state = SNAPSHOT_NAME.fullmatch(state_uri.rpartition("/")[2])
    return read_times(store, index_uri(state_uri, rank)) if is_state else {}


def copy_artifact_files(store: Store, artifact: Artifact, fetched: Path, target: Path) -> None:
    """Write an artifact's files to a folder, with modes, links, empty folders and times."""
    manifest = store.manifest(artifact)
    write_tree(
        target,
        {file.path: file for file in manifest.files},
        lambda path: fetched / path,
        folders=manifest.folders,
        links=manifest.links,
        times=read_snapshot_times(store, artifact.uri, 0),
    )
