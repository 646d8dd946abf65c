"""Publish and restore a command's folder."""

from pathlib import Path

from recipes.command.snapshot_publisher import SnapshotPublisher
from recipes.command.snapshot_store import SnapshotStore
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact, Manifest

PLACE = "s3://hanzo-ml/checkpoints/job"


def publish(folder: Path, store: Store, place: str = PLACE) -> Artifact | None:
    states = SnapshotStore(store, place, keep_last=2)
    return SnapshotPublisher(folder, states, Manifest(kind="checkpoints", files=()), 0.0, lambda: None).publish()


def restore(store: Store, folder: Path, place: str = PLACE) -> Path:
    target = folder / "checkpoints"
    target.mkdir(parents=True)
    SnapshotStore(store, place, keep_last=2).restore_newest(folder / "cache", target)
    return target
