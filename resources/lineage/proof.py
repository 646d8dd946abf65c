"""Prove a model version: verify each file's hash, back to the raw files.

The proof follows every edge from the file that is served. A node is proved if its manifest
has the recorded digest, its files have the manifest's hashes, and the database has the same parents. Nothing is trusted that
can be hashed. A version is proved if its files are of one chain, which begins at its own run: each file alone may be intact,
but another model's.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel
from sqlalchemy import Connection

from recipes.contracts.results import TRAINED_ROLES
from recipes.storage.artifact_store import BrokenArtifact, Store, hash_file
from recipes.storage.manifest import Artifact, Manifest
from resources.lineage.edges import find_artifact, parent_digests
from resources.metadata.registry import deployments
from resources.metadata.registry.model_versions import artifact_row
from resources.metadata.registry.version_lifecycle import ModelVersion

LABELS = {
    "gguf": "export",
    "merged": "merged weights",
    "adapter": "adapter checkpoint",
    "weights": "trained weights",
    "run": "run",
    "base": "base model",
    "dataset": "dataset version",
    "source": "source files",
}
FORMATS = ("gguf", "merged", *TRAINED_ROLES)
SOURCE_FORMATS = (("gguf", "merged"), *(("merged", role) for role in TRAINED_ROLES))
"""Formats of a version, each with one from which it was made."""


def format_kind(format: str) -> str:
    """Return the kind of a format.

    The format of an additional export also names the quantization.
    """
    return format.partition("-")[0]


class ProofNode(BaseModel):
    """The result for one artifact. `problems` is empty if every byte is as recorded."""

    label: str
    uri: str
    digest: str
    files: int = 0
    size_bytes: int = 0
    facts: dict[str, object] = {}
    problems: list[str] = []
    made_from: list["ProofNode"] = []
    seen_above: bool = False


class Proof(BaseModel):
    """The chain of a version. `broken` names each broken edge as `child -> parent: reason`."""

    name: str
    version: int
    ok: bool
    broken: list[str]
    bytes_hashed: int
    chain: ProofNode


class Prover:
    """Follows the chain of one version.

    Each artifact is hashed once, however many paths lead to it.
    """

    def __init__(self, connection: Connection, store: Store) -> None:
        self._connection = connection
        self._store = store
        self._seen: dict[str, ProofNode] = {}
        self._manifests: dict[str, Manifest] = {}
        self.broken: list[str] = []
        self.bytes_hashed = 0

    def prove_served_file(
        self, version: ModelVersion, served_file: Callable[[str], tuple[Path | None, str] | None]
    ) -> ProofNode | None:
        """Return a node for the file that the engine serves.

        Returns None if this version is not being served.
        """
        deployment = deployments.find_serving(self._connection, version.model)
        if deployment is None or deployment.version != version.version:
            return None
        node = ProofNode(label="served file", uri=deployment.url, digest=deployment.sha256)
        exports = [artifact for format, artifact in version.own_artifacts.items() if format_kind(format) == "gguf"]
        deployed = next((export for export in exports if deployment.sha256 in self._file_hashes(export)), None)
        node.made_from = [self.artifact(deployed or version.artifact("gguf"), "served file")]
        if deployed is None:
            self._problem(node, "served file -> export", "the deployed SHA-256 is none of the export's files")
        loaded = served_file(version.model.served_name)
        if loaded is None:
            self._problem(
                node, "served file -> export", f"the engine at {deployment.url} does not serve {version.reference}"
            )
            return node
        path, loaded_sha256 = loaded
        if path is not None:
            node.uri = path.as_uri()
        if loaded_sha256 != deployment.sha256:
            self._problem(node, "served file -> export", f"the engine loaded SHA-256 {loaded_sha256}")
        if path is None:
            # The file is stored in the engine's replicas, each of which verified its hash before loading it.
            return node
        if not path.is_file():
            self._problem(node, "served file -> export", f"{path} is missing")
        else:
            node.files, node.size_bytes = 1, path.stat().st_size
            self.bytes_hashed += node.size_bytes
            if (found := hash_file(path)) != deployment.sha256:
                self._problem(
                    node, "served file -> export", f"{path.name} has SHA-256 {found}, deployed was {deployment.sha256}"
                )
        return node

    def artifact(self, artifact: Artifact, child: str, role: str = "") -> ProofNode:
        """Return a node for an artifact and, below it, everything from which it was made.

        `role` is the artifact's role in its child.
        """
        label = f"{role} split" if artifact.kind == "split" else LABELS.get(artifact.kind, artifact.kind)
        if artifact.digest in self._seen:
            done = self._seen[artifact.digest]
            return done.model_copy(update={"made_from": [], "seen_above": True})
        node = ProofNode(label=label, uri=artifact.uri, digest=artifact.digest)
        self._seen[artifact.digest] = node
        edge = f"{child} -> {label}"
        try:
            manifest = self._store.manifest(artifact)
        except BrokenArtifact as error:
            self._problem(node, edge, str(error))
            return node
        self._manifests[artifact.digest] = manifest
        node.files, node.size_bytes, node.facts = len(manifest.files), manifest.size_bytes, dict(manifest.facts)
        self._hash_files(artifact, manifest, node, edge)
        if parent_digests(self._connection, artifact.digest) != manifest.inputs:
            self._problem(node, edge, f"the database and {artifact.uri}/manifest.json disagree on what it was made from")
        for role, digest in manifest.inputs.items():
            parent = find_artifact(self._connection, digest)
            if parent is None:
                self._problem(node, f"{label} -> {role}", f"no artifact of digest {digest} is recorded")
                continue
            node.made_from.append(self.artifact(parent, label, role))
        return node

    def check_one_chain(self, version: ModelVersion, root: ProofNode) -> None:
        """Check that the version's files were made from each other, and by its run.

        Files that cannot be read have been reported already.
        """
        digests = {format: artifact.digest for format, artifact in version.own_artifacts.items()}
        for format, digest in digests.items():
            kind, manifest = format_kind(format), self._manifests.get(digest)
            for parent in (parent for child, parent in SOURCE_FORMATS if child == kind):
                own = {digests[each] for each in digests if format_kind(each) == parent}
                if manifest is not None and own and manifest.inputs.get(parent) not in own:
                    reason = f"the registry's {LABELS[kind]} of {version.reference} was not made from its {LABELS[parent]}"
                    self._problem(root, f"{LABELS[kind]} -> {LABELS[parent]}", reason)
        for role in TRAINED_ROLES:
            trained = self._manifests.get(digests.get(role, ""))
            run = self._manifests.get(trained.inputs.get("run", "")) if trained is not None else None
            if run is not None and run.facts.get("run_id") != version.run_id:
                reason = f"trained by run {run.facts.get('run_id')}, while {version.reference} is of run {version.run_id}"
                self._problem(root, f"{LABELS[role]} -> run", reason)

    def _hash_files(self, artifact: Artifact, manifest: Manifest, node: ProofNode, edge: str) -> None:
        for file in manifest.files:
            where = f"{artifact.uri}/{file.path}"
            digest = hashlib.sha256()
            try:
                for piece in self._store.pieces(artifact.uri, file):
                    digest.update(piece)
            except FileNotFoundError as error:
                self._problem(node, edge, f"a chunk of {where}: {error}" if file.chunks else f"{where} is missing")
                continue
            except BrokenArtifact as error:
                self._problem(node, edge, str(error))
                continue
            self.bytes_hashed += file.size
            if (found := digest.hexdigest()) != file.sha256:
                self._problem(node, edge, f"{where} has SHA-256 {found}, recorded is {file.sha256}")

    def _file_hashes(self, artifact: Artifact) -> set[str]:
        try:
            return {file.sha256 for file in self._store.manifest(artifact).files}
        except BrokenArtifact:
            return set()

    def _problem(self, node: ProofNode, edge: str, reason: str) -> None:
        node.problems.append(reason)
        self.broken.append(f"{edge}: {reason}")


def prove_version(
    connection: Connection, store: Store, version: ModelVersion, served_file: Callable[[str], tuple[Path | None, str] | None]
) -> Proof:
    """Prove a version.

    `served_file` returns the file served under a name (None if on other machines), and the hash that the engine loaded.
    """
    prover = Prover(connection, store)
    root = ProofNode(label=version.reference, uri=version.source, digest=version.run_id or "")
    if served := prover.prove_served_file(version, served_file):
        root.made_from.append(served)
    if not any(format in version.artifacts for format in FORMATS):
        prover._problem(root, f"{version.reference} -> artifacts", "none was made here, so there is nothing to prove")
    # The first format of each kind, then additional exports (`gguf-f16`).
    for format in (*FORMATS, *sorted(version.own_artifacts.keys() - set(FORMATS))):
        if format not in version.artifacts:
            continue
        if format not in version.own_artifacts:
            prover._problem(root, f"{version.reference} -> {format}", "the registry says of it what no pointer says")
            continue
        artifact = version.artifact(format)
        if version.artifacts[format] != artifact_row(artifact):
            prover._problem(root, f"{version.reference} -> {format}", "the registry says of it what its pointer does not")
        child = prover.artifact(artifact, version.reference)
        if not child.seen_above:
            root.made_from.append(child)
    prover.check_one_chain(version, root)
    return Proof(
        name=version.name,
        version=version.version,
        ok=not prover.broken,
        broken=prover.broken,
        bytes_hashed=prover.bytes_hashed,
        chain=root,
    )
