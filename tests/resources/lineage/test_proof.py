"""Lineage proof: a flipped bit, missing file or tampered edge breaks exactly its edge."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, update

from recipes.contracts.job import StoreAddress
from recipes.storage.artifact_store import MANIFEST_FILE, Store
from recipes.storage.buckets import StoreUnavailable
from recipes.storage.manifest import Artifact
from resources.errors import HanzoError
from resources.lineage.data_reach import model_digests
from resources.lineage.edges import find_artifact, parent_digests, record_artifact
from resources.lineage.model_ancestry import models_in_use
from resources.lineage.proof import Proof, ProofNode, prove_version
from resources.metadata.database import Database
from resources.metadata.registry import deployments
from resources.metadata.registry.model_versions import LoggedFiles, artifact_row
from resources.metadata.tables import artifacts, lineage_edges, model_versions
from tests.support.migrated_database import migrate
from tests.support.resources.model_versions import RegisteredVersions, model, registration

BUCKETS = {kind: f"hanzo-{kind}" for kind in ("datasets", "checkpoints", "models")}
FILES = {
    "source": ("s3://hanzo-ml/datasets/d/1/source", {"a.jsonl": b"{}\n", "inner/b.jsonl": b"{ }\n"}),
    "dataset": ("s3://hanzo-ml/datasets/d/1/records", {"records.jsonl": b"{}\n{}\n"}),
    "train": ("s3://hanzo-ml/datasets/d/1/splits/x/train", {"train.jsonl": b"train"}),
    "validation": ("s3://hanzo-ml/datasets/d/1/splits/x/validation", {"validation.jsonl": b"validation"}),
    "run": ("s3://hanzo-ml/runs/r1/record", {"run.json": b'{"seed": 42}'}),
    "base": ("s3://hanzo-models/base/b", {"model.safetensors": b"base weights", "config.json": b"{}"}),
    "adapter": ("s3://hanzo-ml/runs/r1/checkpoint-final/adapter", {"adapter_model.safetensors": b"adapter weights"}),
    "merged": ("s3://hanzo-models/m/v1/safetensors", {"model.safetensors": b"merged weights"}),
    "gguf": ("s3://hanzo-models/m/v1/gguf-q8_0", {"model.gguf": b"GGUF weights"}),
}
INPUTS = {
    "source": {},
    "dataset": {"source": "source"},
    "train": {"dataset": "dataset"},
    "validation": {"dataset": "dataset"},
    "run": {"train": "train", "validation": "validation"},
    "base": {},
    "adapter": {"run": "run", "train": "train", "validation": "validation", "base": "base"},
    "merged": {"adapter": "adapter", "base": "base"},
    "gguf": {"merged": "merged"},
}
LABELS = {
    "source": "source files",
    "dataset": "dataset version",
    "train": "train split",
    "validation": "validation split",
    "run": "run",
    "base": "base model",
    "adapter": "adapter checkpoint",
    "merged": "merged weights",
    "gguf": "export",
}
"""Label of each artifact in an edge."""


@dataclass
class Chain:
    store: Store
    versions: RegisteredVersions
    made: dict[str, Artifact] = field(default_factory=dict)

    @property
    def database(self) -> Database:
        return self.versions.database

    def publish(self, folder: Path) -> None:
        for name, (uri, files) in FILES.items():
            source = folder / name
            for path, data in files.items():
                (source / path).parent.mkdir(parents=True, exist_ok=True)
                (source / path).write_bytes(data)
            kind = "split" if name in ("train", "validation") else name
            inputs = {role: self.made[parent].digest for role, parent in INPUTS[name].items()}
            facts: dict[str, Any] = {"split": name} if kind == "split" else {"run_id": "r1"} if kind == "run" else {}
            self.made[name] = self.store.publish(source, uri, kind, inputs=inputs, facts=facts)
        with self.database.write() as connection:
            for artifact in self.made.values():
                record_artifact(connection, artifact, self.store.manifest(artifact))
            version = self.versions.registry.register(
                connection, model(), registration("r1"), {"adapter": self.made["adapter"]}
            )
            exports = {"merged": self.made["merged"], "gguf": self.made["gguf"]}
            self.versions.registry.add_artifacts(connection, version, exports)

    def path(self, name: str, file: str) -> Path:
        path = self.store.local_path(f"{FILES[name][0]}/{file}")
        assert path is not None
        return path

    def prove(self, served: Callable[[str], tuple[Path | None, str] | None] = lambda name: None, version: int = 1) -> Proof:
        with self.database.read() as connection:
            return prove_version(connection, self.store, self.versions.registry.get(model(), version, connection), served)

    def parent_label(self, edge: str) -> str:
        return edge.split(": ", 1)[0].split(" -> ")[1]


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    store = Store(StoreAddress(root=(tmp_path / "objects").as_uri(), buckets=BUCKETS))
    chain = Chain(store, RegisteredVersions(Database(f"sqlite:///{tmp_path}/metadata.db")))
    migrate(chain.database)
    chain.publish(tmp_path / "work")
    return chain


@contextmanager
def flipped(path: Path, bit: int) -> Iterator[None]:
    data = path.read_bytes()
    broken = bytearray(data)
    broken[bit // 8] ^= 1 << bit % 8
    path.write_bytes(broken)
    try:
        yield
    finally:
        path.write_bytes(data)


def labels(node: ProofNode) -> list[str]:
    return [node.label, *(label for parent in node.made_from for label in labels(parent))]


EVERY_FILE = [(name, file) for name, (_, files) in FILES.items() for file in (*files, MANIFEST_FILE)]


@pytest.mark.requirement("B9", "E9", "O11")
def test_a_whole_chain_is_proved_to_its_source_files_and_every_byte_is_hashed_once(chain: Chain) -> None:
    proof = chain.prove()
    assert (proof.ok, proof.broken) == (True, [])
    assert proof.bytes_hashed == sum(len(data) for _, files in FILES.values() for data in files.values())
    assert set(labels(proof.chain)) == {"m version 1", *LABELS.values()}


@pytest.mark.parametrize("mount_point", [False, True], ids=["moved", "unmounted"])
def test_unavailable_store_is_not_reported_as_missing_files(chain: Chain, tmp_path: Path, mount_point: bool) -> None:
    objects = tmp_path / "objects"
    objects.rename(tmp_path / "away")
    if mount_point:
        objects.mkdir()
    with pytest.raises(StoreUnavailable):
        chain.prove()


@pytest.mark.parametrize(("name", "file"), EVERY_FILE)
def test_one_flipped_bit_anywhere_breaks_exactly_its_edge(chain: Chain, name: str, file: str) -> None:
    path = chain.path(name, file)
    size = len(path.read_bytes()) * 8
    for bit in {0, size // 2, size - 1}:
        with flipped(path, bit):
            proof = chain.prove()
        assert not proof.ok
        assert len(proof.broken) == 1, proof.broken
        assert f"{FILES[name][0]}/{file}" in proof.broken[0]
        assert chain.parent_label(proof.broken[0]) == LABELS[name]
    assert chain.prove().ok


@pytest.mark.parametrize(("name", "file"), EVERY_FILE)
def test_one_deleted_file_breaks_exactly_its_edge(chain: Chain, name: str, file: str) -> None:
    path = chain.path(name, file)
    data = path.read_bytes()
    path.unlink()
    (edge,) = chain.prove().broken
    assert edge.endswith(f"{FILES[name][0]}/{file} is missing")
    path.write_bytes(data)
    assert chain.prove().ok


def test_two_faults_are_both_named(chain: Chain) -> None:
    with flipped(chain.path("base", "config.json"), 3), flipped(chain.path("source", "a.jsonl"), 3):
        broken = chain.prove().broken
    assert sorted(map(chain.parent_label, broken)) == ["base model", "source files"]


EDGES = [(child, role) for child, inputs in INPUTS.items() for role in inputs]


@pytest.mark.parametrize(("child", "role"), EDGES)
@pytest.mark.parametrize("tamper", ["delete", "redirect", "rename"])
def test_a_tampered_edge_of_the_database_breaks_exactly_that_node(chain: Chain, child: str, role: str, tamper: str) -> None:
    where = (lineage_edges.c.child == chain.made[child].digest) & (lineage_edges.c.role == role)
    with chain.database.write() as connection:
        if tamper == "delete":
            connection.execute(delete(lineage_edges).where(where))
        elif tamper == "redirect":
            connection.execute(update(lineage_edges).where(where).values(parent="e" * 64))
        else:
            connection.execute(update(lineage_edges).where(where).values(role="other"))
    proof = chain.prove()
    (edge,) = proof.broken
    assert not proof.ok
    assert chain.parent_label(edge) == LABELS[child] and "disagree" in edge


def test_an_edge_that_was_added_to_the_database_breaks_its_node(chain: Chain) -> None:
    with chain.database.write() as connection:
        row = {"child": chain.made["adapter"].digest, "role": "more", "parent": chain.made["source"].digest}
        connection.execute(lineage_edges.insert().values(**row))
    (edge,) = chain.prove().broken
    assert chain.parent_label(edge) == "adapter checkpoint"


def test_artifact_missing_in_the_database_is_named(chain: Chain) -> None:
    with chain.database.write() as connection:
        connection.exec_driver_sql("PRAGMA defer_foreign_keys=ON")
        connection.execute(delete(lineage_edges).where(lineage_edges.c.child == chain.made["dataset"].digest))
        connection.execute(delete(artifacts).where(artifacts.c.digest == chain.made["dataset"].digest))
    broken = chain.prove().broken
    assert broken and all(chain.made["dataset"].digest in edge for edge in broken)


def test_artifact_with_another_location_in_the_database_is_not_proved(chain: Chain) -> None:
    with chain.database.write() as connection:
        where = artifacts.c.digest == chain.made["base"].digest
        connection.execute(update(artifacts).where(where).values(uri="s3://hanzo-models/base/other"))
    (edge,) = chain.prove().broken
    assert "s3://hanzo-models/base/other/manifest.json is missing" in edge


def test_wrong_checksum_in_the_registry_is_named(chain: Chain) -> None:
    changed = dict(chain.versions.registry.read(model(), 1).artifacts)
    changed["merged"] = {**changed["merged"], "checksum": "sha256:" + "0" * 64}
    with chain.database.write() as connection:
        connection.execute(update(model_versions).values(artifacts=changed))
    (edge,) = chain.prove().broken
    assert edge.startswith("m version 1 -> merged: ")


def point(chain: Chain, **artifacts: Artifact) -> None:
    """Point version 1 of the registry at these artifacts, including their checksums."""
    changed = {**chain.versions.registry.read(model(), 1).artifacts} | {
        name: artifact_row(artifacts[name]) for name in artifacts
    }
    with chain.database.write() as connection:
        connection.execute(update(model_versions).values(artifacts=changed))


def other(chain: Chain, folder: Path, kind: str, **inputs: Artifact) -> Artifact:
    """Publish an intact artifact of another model."""
    (folder / kind).mkdir(parents=True)
    (folder / kind / "model").write_bytes(b"other " + kind.encode())
    digests = {role: artifact.digest for role, artifact in inputs.items()}
    made = chain.store.publish(folder / kind, f"s3://hanzo-models/other/v1/{kind}", kind, inputs=digests)
    with chain.database.write() as connection:
        record_artifact(connection, made, chain.store.manifest(made))
    return made


def test_export_of_another_model_is_not_proved(chain: Chain, tmp_path: Path) -> None:
    """Regression: every edge was valid, but nothing checked that the export used this version's weights."""
    merged = other(chain, tmp_path, "merged", adapter=chain.made["adapter"], base=chain.made["base"])
    export = other(chain, tmp_path, "gguf", merged=merged)
    point(chain, gguf=export)
    (edge,) = chain.prove().broken
    assert edge.startswith("export -> merged weights: ")
    point(chain, gguf=export, merged=merged)
    assert chain.prove().ok, "two exports of one training are both its own"
    strange = other(chain, tmp_path / "strange", "merged", base=chain.made["base"])
    point(chain, gguf=other(chain, tmp_path / "strange", "gguf", merged=strange), merged=strange)
    (edge,) = chain.prove().broken
    assert edge.startswith("merged weights -> adapter checkpoint: ")


@pytest.mark.parametrize("served", ["gguf", "gguf-f16"])
def test_a_version_with_two_exports_is_proved_whichever_is_served(chain: Chain, tmp_path: Path, served: str) -> None:
    (tmp_path / "f16").mkdir()
    (tmp_path / "f16" / "model.gguf").write_bytes(b"GGUF larger weights")
    inputs = {"merged": chain.made["merged"].digest}
    other = chain.store.publish(tmp_path / "f16", "s3://hanzo-models/m/v1/export-1/gguf-f16", "gguf", inputs=inputs)
    with chain.database.write() as connection:
        record_artifact(connection, other, chain.store.manifest(other))
        version = chain.versions.registry.get(model(), 1, connection)
        chain.versions.registry.add_artifacts(connection, version, {"gguf-f16": other})
    path = chain.path("gguf", "model.gguf") if served == "gguf" else chain.store.local_path(f"{other.uri}/model.gguf")
    assert path is not None
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    with chain.database.write() as connection:
        row = deployments.begin_deployment(connection, model(), version=1, promotion=1, url="http://engine", sha256=sha256)
        deployments.mark_serving(connection, row)
    proof = chain.prove(lambda name: (path, sha256))
    assert (proof.ok, proof.broken) == (True, [])
    assert labels(proof.chain).count("export") == 2
    with flipped(path, 3):
        assert {edge.partition(":")[0] for edge in chain.prove(lambda name: (path, sha256)).broken} == {
            "served file -> export"
        }


def test_version_registered_under_another_run_is_not_proved(chain: Chain) -> None:
    made = {name: chain.made[name] for name in ("adapter", "merged", "gguf")}
    with chain.database.write() as connection:
        chain.versions.registry.register(connection, model(), registration("r2"), made)
    (edge,) = chain.prove(version=2).broken
    assert edge.startswith("adapter checkpoint -> run: ") and "r1" in edge and "r2" in edge


@pytest.mark.parametrize("tampered", [{"path": "s3://elsewhere/"}, {"size_bytes": 1}])
def test_tampered_artifact_entry_of_the_registry_is_named(chain: Chain, tampered: dict[str, Any]) -> None:
    changed = dict(chain.versions.registry.read(model(), 1).artifacts)
    changed["gguf"] = {**changed["gguf"], **tampered}
    with chain.database.write() as connection:
        connection.execute(update(model_versions).values(artifacts=changed))
    (edge,) = chain.prove().broken
    assert edge.startswith("m version 1 -> gguf: ")


def test_a_version_that_points_to_nothing_is_not_proved(chain: Chain) -> None:
    """Without a hashed byte or a reached source there is no proof."""
    with chain.database.write() as connection:
        chain.versions.registry.register(connection, model(), registration("r2"), {}, stage="none")
    proof = chain.prove(version=2)
    assert not proof.ok and proof.broken


def test_files_logged_by_a_client_are_neither_proof_nor_own_artifacts(chain: Chain) -> None:
    logged = {"safetensors": LoggedFiles("s3://hanzo-ml/runs/r2/artifacts/m.safetensors", 1, f"sha256:{'0' * 64}")}
    with chain.database.write() as connection:
        version = chain.versions.registry.register(connection, model(), registration("r2"), logged, stage="staging")
        assert chain.versions.registry.last_accepted(model(), connection) == chain.versions.registry.get(
            model(), 1, connection
        )
        found = {used.reference: used.digests for used in models_in_use(connection, "default")}
    assert (version.own_artifacts, version.is_awaiting_export, model_digests(version)) == ({}, False, [])
    assert found["m@2"] == frozenset() != found["m@1"]
    assert [edge.partition(":")[0] for edge in chain.prove(version=2).broken] == ["m version 2 -> artifacts"]
    with pytest.raises(HanzoError, match="has no safetensors yet"):
        version.artifact("safetensors")


def test_registry_entry_without_an_artifact_is_not_proved(chain: Chain) -> None:
    changed = dict(chain.versions.registry.read(model(), 1).artifacts)
    changed["gguf"] = {key: value for key, value in changed["gguf"].items() if key != "artifact"}
    with chain.database.write() as connection:
        connection.execute(update(model_versions).values(artifacts=changed))
    (edge,) = chain.prove().broken
    assert edge.startswith("m version 1 -> gguf: ")


def test_recording_an_artifact_twice_changes_nothing(chain: Chain) -> None:
    adapter = chain.made["adapter"]
    with chain.database.write() as connection:
        record_artifact(connection, adapter, chain.store.manifest(adapter))
        assert find_artifact(connection, adapter.digest) == adapter
        assert parent_digests(connection, adapter.digest) == chain.store.manifest(adapter).inputs


class Served:
    """A deployed version: a database row, and an engine that reports the loaded file."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.path = chain.path("gguf", "model.gguf")
        self.sha256 = hashlib.sha256(self.path.read_bytes()).hexdigest()
        with chain.database.write() as connection:
            deployment = deployments.begin_deployment(
                connection, model(), version=1, promotion=1, url="http://engine", sha256=self.sha256
            )
            deployments.mark_serving(connection, deployment)

    def prove(self) -> Proof:
        return self.chain.prove(lambda name: (self.path, self.sha256))


@pytest.fixture
def served(chain: Chain) -> Served:
    return Served(chain)


def test_the_chain_of_a_served_version_begins_with_the_file_that_is_served(served: Served) -> None:
    proof = served.prove()
    assert (proof.ok, proof.broken) == (True, [])
    assert labels(proof.chain)[:3] == ["m version 1", "served file", "export"]


@pytest.mark.parametrize(("name", "file"), EVERY_FILE)
def test_a_served_version_with_a_flipped_bit_is_not_proved(served: Served, name: str, file: str) -> None:
    with flipped(served.chain.path(name, file), 9):
        proof = served.prove()
    assert not proof.ok
    if name == "gguf":  # the file is also the served one: both of its edges may be named, no other
        assert all(edge.startswith("served file -> export: ") for edge in proof.broken)
    else:
        (edge,) = proof.broken
        assert f"{FILES[name][0]}/{file}" in edge
    assert served.prove().ok


def test_flipped_bit_in_the_served_copy_breaks_the_first_edge(served: Served, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(served.path.read_bytes())
    served.path = copy
    assert served.prove().ok
    with flipped(copy, 0):
        (edge,) = served.prove().broken
    assert edge.startswith("served file -> export: copy.gguf has SHA-256 ")
    copy.unlink()
    (edge,) = served.prove().broken
    assert edge.startswith("served file -> export: ") and edge.endswith("copy.gguf is missing")


def test_engine_that_serves_another_file_is_named(served: Served) -> None:
    served_file = served.path
    assert "does not serve m version 1" in served.chain.prove(lambda name: None).broken[0]
    (edge,) = served.chain.prove(lambda name: (served_file, "f" * 64)).broken
    assert edge.startswith("served file -> export: the engine loaded SHA-256 " + "f" * 64)


def test_version_served_by_replicas_is_proved_by_their_reported_checksums(served: Served) -> None:
    """Their files are on other machines."""
    proof = served.chain.prove(lambda name: (None, served.sha256))
    assert (proof.ok, labels(proof.chain)[:3]) == (True, ["m version 1", "served file", "export"])
    (edge,) = served.chain.prove(lambda name: (None, f"{'f' * 64}, {served.sha256}")).broken
    assert edge.startswith("served file -> export: the engine loaded SHA-256 " + "f" * 64)


def test_a_deployment_record_with_another_hash_is_named(served: Served) -> None:
    with served.chain.database.write() as connection:
        connection.exec_driver_sql("UPDATE deployments SET sha256 = 'ffff'")
    broken = served.prove().broken
    assert broken and all(edge.startswith("served file -> export: ") for edge in broken)
