"""The object store, as programs and the control plane alike see it: logical URIs in, bytes out, manifest last.

The only place that touches `obstore`. Logical URIs are the specification's (`s3://hanzo-ml/<kind>/...` and
`s3://hanzo-models/...`, checklist Z8); `StoreAddress.buckets` maps their kinds to real buckets, which are folders below
`root` in embedded mode. What an artifact means is not known here.
"""

import hashlib
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlparse

import obstore
from obstore.exceptions import GenericError
from obstore.store import LocalStore, S3Store
from pydantic import JsonValue, ValidationError

from recipes.schema import Artifact, FileRecord, Manifest, StoreAddress

MANIFEST = "manifest.json"
KIND_BUCKETS = {"datasets": "datasets", "checkpoints": "checkpoints", "runs": "checkpoints"}
CHUNK = 1 << 20
UNUSABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
"""What no object's name can hold: control characters (a rule of obstore), and halves of characters, which no UTF-8 has."""


class BrokenArtifact(Exception):
    """Bytes in the store are not what their manifest or their name says."""


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def describe(folder: Path) -> tuple[FileRecord, ...]:
    """Every file below `folder` but its manifest, in the order of their names."""
    return tuple(
        FileRecord(path=file.relative_to(folder).as_posix(), sha256=sha256_of(file), size=file.stat().st_size)
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name != MANIFEST
    )


class Store:
    """Reads and writes artifacts at a `StoreAddress`. S3 credentials come from the AWS variables of the environment."""

    def __init__(self, address: StoreAddress) -> None:
        self.address = address
        self._buckets: dict[str, LocalStore | S3Store] = {}

    def _locate(self, uri: str) -> tuple[str, str]:
        """Logical URI -> (bucket, key)."""
        scheme, _, rest = uri.partition("://")
        logical, _, key = rest.partition("/")
        key = key.strip("/")
        # Not urlparse: it drops newlines, and takes `#`, `?` and `%` in a name for syntax.
        if scheme != "s3" or not logical or any(part in ("", ".", "..") or UNUSABLE.search(part) for part in key.split("/")):
            raise BrokenArtifact(f"not a URI of this store: {uri!r}")
        if logical == "hanzo-ml":
            kind = key.split("/")[0]
            if kind not in KIND_BUCKETS:
                raise BrokenArtifact(f"{uri}: '{kind}' is none of {', '.join(KIND_BUCKETS)}")
            return self.address.buckets[KIND_BUCKETS[kind]], key
        if logical == "hanzo-models":
            return self.address.buckets["models"], key
        raise BrokenArtifact(f"{uri}: unknown logical bucket '{logical}' (hanzo-ml and hanzo-models exist)")

    def _bucket(self, name: str) -> LocalStore | S3Store:
        if name not in self._buckets:
            root = urlparse(self.address.root)
            if root.scheme == "file":
                self._buckets[name] = LocalStore(Path(unquote(root.path)) / name, mkdir=True)
            else:
                self._buckets[name] = S3Store(
                    name,
                    endpoint=self.address.root,
                    client_options={"allow_http": root.scheme == "http"},
                    virtual_hosted_style_request=False,
                )
        return self._buckets[name]

    def put_file(self, uri: str, path: Path) -> None:
        bucket, key = self._locate(uri)
        obstore.put(self._bucket(bucket), key, path)

    def put_bytes(self, uri: str, data: bytes) -> None:
        bucket, key = self._locate(uri)
        obstore.put(self._bucket(bucket), key, data)

    def get_bytes(self, uri: str) -> bytes:
        """Raises FileNotFoundError when nothing lies there."""
        bucket, key = self._locate(uri)
        return bytes(obstore.get(self._bucket(bucket), key).bytes())

    def sha256(self, uri: str) -> str:
        """SHA-256 of the bytes that lie at `uri` now. Raises FileNotFoundError."""
        bucket, key = self._locate(uri)
        digest = hashlib.sha256()
        for chunk in obstore.get(self._bucket(bucket), key).stream(min_chunk_size=CHUNK):
            digest.update(chunk)
        return digest.hexdigest()

    def list(self, uri: str) -> list[str]:
        """Logical URIs of all objects below `uri`, in the order of their names."""
        bucket, key = self._locate(uri)
        paths = [meta["path"] for batch in obstore.list(self._bucket(bucket), prefix=key) for meta in batch]
        logical = uri.removeprefix("s3://").partition("/")[0]
        return sorted(f"s3://{logical}/{path}" for path in paths)

    def exists(self, uri: str) -> bool:
        """Whether an object, or anything below it, lies at `uri`."""
        bucket, key = self._locate(uri)
        try:
            obstore.head(self._bucket(bucket), key)
        except (FileNotFoundError, GenericError):  # generic: a folder's name that is a file's, on a local disk
            return bool(self.list(uri))
        return True

    def delete(self, uri: str) -> None:
        """Delete the object at `uri`, or everything below it, manifest first: a half-deleted artifact does not exist."""
        objects = self.list(uri) or [uri]
        for object_uri in sorted(objects, key=lambda name: not name.endswith("/" + MANIFEST)):
            bucket, key = self._locate(object_uri)
            with suppress(FileNotFoundError):
                obstore.delete(self._bucket(bucket), key)

    def local_path(self, uri: str) -> Path | None:
        """The folder or file itself where the store is a folder, else None."""
        root = urlparse(self.address.root)
        if root.scheme != "file":
            return None
        bucket, key = self._locate(uri)
        return Path(unquote(root.path)) / bucket / key

    def publish(
        self,
        folder: Path,
        uri: str,
        kind: str,
        *,
        inputs: Mapping[str, str] | None = None,
        facts: Mapping[str, JsonValue] | None = None,
    ) -> Artifact:
        """Upload a folder and, last, its manifest: an artifact that is half there has no manifest (row I15)."""
        manifest = Manifest(kind=kind, files=describe(folder), inputs=dict(inputs or {}), facts=dict(facts or {}))
        return self.publish_described(folder, uri, manifest)

    def publish_described(self, folder: Path, uri: str, manifest: Manifest) -> Artifact:
        """`publish` for a folder whose manifest is known already."""
        uri = uri.rstrip("/")
        artifact = Artifact(kind=manifest.kind, uri=uri, digest=manifest.digest, size_bytes=manifest.size_bytes)
        for file in manifest.files:
            self.put_file(f"{uri}/{file.path}", folder / file.path)
        self.put_bytes(f"{uri}/{MANIFEST}", manifest.to_bytes())
        return artifact

    def find(self, uri: str) -> Artifact | None:
        """The artifact whose manifest lies at `uri`, if one does."""
        try:
            manifest = Manifest.model_validate_json(self.get_bytes(f"{uri.rstrip('/')}/{MANIFEST}"))
        except (FileNotFoundError, ValidationError):
            return None
        return Artifact(kind=manifest.kind, uri=uri.rstrip("/"), digest=manifest.digest, size_bytes=manifest.size_bytes)

    def manifest(self, artifact: Artifact) -> Manifest:
        """The manifest at the artifact's place.

        Raises:
            BrokenArtifact: it is not there, or its bytes do not have the artifact's digest.
        """
        where = f"{artifact.uri}/{MANIFEST}"
        try:
            raw = self.get_bytes(where)
        except FileNotFoundError:
            raise BrokenArtifact(f"{where} is missing") from None
        if hashlib.sha256(raw).hexdigest() != artifact.digest:
            raise BrokenArtifact(f"{where} has SHA-256 {hashlib.sha256(raw).hexdigest()}, recorded is {artifact.digest}")
        try:
            return Manifest.model_validate_json(raw)
        except ValidationError as error:
            raise BrokenArtifact(f"{where} is no manifest: {error.error_count()} problems") from None

    def fetch(self, artifact: Artifact, cache: Path) -> Path:
        """The artifact as a verified local folder: in place where the store is a folder, else downloaded into `cache`.

        What the cache has already is not downloaded again, unless its bytes are not the manifest's.

        Raises:
            BrokenArtifact: a file is missing or its SHA-256 is not the manifest's (row X7).
        """
        manifest = self.manifest(artifact)
        local = self.local_path(artifact.uri)
        folder = local or cache / artifact.digest
        for file in manifest.files:
            problem = what_is_broken(folder, file)
            if problem and local is None:
                self._download(f"{artifact.uri}/{file.path}", folder / PurePosixPath(file.path))
                problem = what_is_broken(folder, file)
            if problem:
                raise BrokenArtifact(f"{artifact.uri}/{problem}")
        return folder

    def _download(self, uri: str, target: Path) -> None:
        bucket, key = self._locate(uri)
        try:
            found = obstore.get(self._bucket(bucket), key)
        except FileNotFoundError:
            raise BrokenArtifact(f"{uri} is missing") from None
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(target.name + ".part")
        with part.open("wb") as out:
            for chunk in found.stream(min_chunk_size=CHUNK):
                out.write(chunk)
        part.replace(target)


def what_is_broken(folder: Path, file: FileRecord) -> str | None:
    """What is wrong with a file of a local folder, as one line that begins with its name; None when all is well."""
    path = folder / file.path
    if not path.is_file():
        return f"{file.path} is missing"
    if path.stat().st_size != file.size:
        return f"{file.path} has {path.stat().st_size} bytes, recorded are {file.size}"
    if (found := sha256_of(path)) != file.sha256:
        return f"{file.path} has SHA-256 {found}, recorded is {file.sha256}"
    return None
