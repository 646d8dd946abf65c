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
"""Its number, and of what it is: two machines that take each other for dead never write different files into one folder."""


@dataclass
class SnapshotStore:
    """Of one job, below a place.

    Args:
        keep_last: how many of the newest stay.
    """

    store: Store
    location: str
    keep_last: int
    _uploaded: dict[str, str] = field(default_factory=dict)
    """Where files lie that this process sent, by their SHA-256: what has not changed is not sent again.

    Of another's it is not known what lies there now: a damaged object became the next state's, under a good one's SHA-256.
    """
    _verified: set[str] = field(default_factory=set)
    """Where states lie that this process made, or has read."""

    def newest(self) -> Artifact | None:
        """The newest that has a manifest."""
        return next(iter(self._list_snapshots()), None)

    def restore_newest(self, cache: Path, target: Path) -> Artifact | None:
        """Make `target` what the newest whole state is, and return it; None where there is none. Broken ones are removed.

        Those of before there were states lie at the place itself.
        """
        legacy = self.store.find(self.location)
        for state in [*self._list_snapshots(), *([legacy] if legacy else [])]:
            whole = target.with_name(f".{target.name}.tmp")  # so that a kill leaves no half of it for the command
            remove_tree(whole)
            try:
                copy_artifact_files(self.store, state, self.store.fetch(state, cache), whole)
            except BrokenArtifact as problem:
                log_line(f"checkpoints: the command begins without those at {state.uri}, which are not whole: {problem}")
                if state is not legacy:
                    self.delete(state.uri)
                continue
            whole.replace(target)
            return state
        return None

    def put_snapshot(
        self, folder: Path, manifest: Manifest, on_upload: Callable[[str], None], times: Mapping[str, int] | None = None
    ) -> Artifact:
        """A new state, unless the newest is just this. `on_upload` is called with each uploaded file, and may raise.

        Args:
            times: modification times by path, in nanoseconds. Those of a state that is there already are replaced.
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
        """Store the times of a state's files, or of a node's part of it, where others are there."""
        uri = index_uri(f"{self.location}/{name}", rank)
        if read_times(self.store, uri) != times:
            put_times(self.store, uri, times)

    def next_name(self, digest: str) -> str:
        """Of a state that is to be the newest; `digest` tells it from one that another machine makes meanwhile."""
        return f"state-{max(self._snapshot_numbers().values(), default=0) + 1}-{digest[:12]}"

    def upload_files(self, uri: str, folder: Path, manifest: Manifest, on_upload: Callable[[str], None]) -> None:
        """The files of a state, or of a node's part of it, without what makes it one."""
        for file in manifest.files:
            file_uri = f"{uri}/{file.object_path}"
            if not self._copy_existing(file.sha256, file_uri):
                self.store.put_file(file_uri, folder / file.path)
            self._uploaded[file.sha256] = file_uri
            on_upload(file.path)

    def complete(self, name: str, manifest: Manifest) -> Artifact:
        """Make a state of the files that were sent; old ones go."""
        made = self.store.put_manifest(f"{self.location}/{name}", manifest)
        self._verified.add(made.uri)
        found = SNAPSHOT_NAME.fullmatch(name)
        assert found is not None
        self._remove_old(int(found[1]))
        return made

    def remove_incomplete(self, *, keep_newest: bool) -> None:
        """What was begun and never became a state. Files of the newest need not be sent again by who tries once more."""
        numbers = self._snapshot_numbers()
        whole = {state.uri for state in self._list_snapshots()}
        incomplete = sorted((uri for uri in numbers if uri not in whole), key=lambda uri: numbers[uri])
        for uri in incomplete[:-1] if keep_newest else incomplete:
            self.delete(uri)

    def free_space(self) -> None:
        """Remove all but the newest whole state, also those that `keep_last` would keep."""
        newest = self.newest()
        for uri in self._snapshot_numbers():
            if newest is None or uri != newest.uri:
                self.delete(uri)

    def _is_intact(self, state: Artifact, manifest: Manifest, on_upload: Callable[[str], None]) -> bool:
        """Whether each file has the bytes that the manifest says. What another process made is read, once."""
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
        """Whether a file was made of one that lies in the store already. S3 copies none of more than 5 GB.

        In a folder a copy is a link, and states that share a file share its damage too: there none is older than another.
        """
        if sha256 not in self._uploaded or self.store.local_path(file_uri) is not None:
            return False
        try:
            self.store.copy(self._uploaded[sha256], file_uri)
        except (FileNotFoundError, StoreUnavailable):
            return False
        return True

    def _list_snapshots(self) -> list[Artifact]:
        """Those that have a manifest, newest first."""
        numbers = self._snapshot_numbers()
        found = (self.store.find(uri) for uri in sorted(numbers, key=lambda uri: (-numbers[uri], uri)))
        return [state for state in found if state]

    def _snapshot_numbers(self) -> dict[str, int]:
        """The numbers of all folders of states, by their URIs, also of those that have no manifest."""
        names = {uri.removeprefix(f"{self.location}/").partition("/")[0] for uri in self.store.list(self.location)}
        return {f"{self.location}/{name}": int(found[1]) for name in names if (found := SNAPSHOT_NAME.fullmatch(name))}

    def delete(self, uri: str) -> None:
        """Delete a state, then its times."""
        self.store.delete(uri)
        for entry in self.store.list(snapshot_index_uri(uri)):
            self.store.remove(entry)

    def _remove_old(self, newest: int) -> None:
        """Those that do not stay, and what was begun before the newest and never became one."""
        retained = {state.uri for state in self._list_snapshots()[: self.keep_last]}
        for uri, number in self._snapshot_numbers().items():
            if number < newest and uri not in retained:
                self.delete(uri)


def snapshot_index_uri(state_uri: str) -> str:
    """The folder of what is known of a state beside its files: with that of other states beside the folder of all states."""
    location, _, name = state_uri.rpartition("/")
    return f"{location}.index/{name}"


def index_uri(state_uri: str, rank: int) -> str:
    """The part of a node."""
    return f"{snapshot_index_uri(state_uri)}/node-{rank}"


def read_snapshot_times(store: Store, state_uri: str, rank: int) -> dict[str, int]:
    """The times of a node's files in a state; empty for what was published before there were states."""
    is_state = SNAPSHOT_NAME.fullmatch(state_uri.rpartition("/")[2])
    return read_times(store, index_uri(state_uri, rank)) if is_state else {}


def copy_artifact_files(store: Store, artifact: Artifact, fetched: Path, target: Path) -> None:
    """Write what the artifact names into a folder, with its modes, links, empty folders and times, and nothing else."""
    manifest = store.manifest(artifact)
    write_tree(
        target,
        {file.path: file for file in manifest.files},
        lambda path: fetched / path,
        folders=manifest.folders,
        links=manifest.links,
        times=read_snapshot_times(store, artifact.uri, 0),
    )
