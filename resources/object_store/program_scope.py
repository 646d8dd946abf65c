"""Which objects the pods of a program may read and write.

Only those that the job document names. Reads: the job's inputs and the origins that their manifests select lines from, its
outputs, its result, its run's folders, base models. Writes: declared outputs, the result, usage and unsent metrics next to
it, logs of the caller's own attempt, and a base model that the recipe pins and that does not exist yet.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from recipes.contracts.job import BadConfiguration, Job, Program
from recipes.contracts.results import UNSENT_METRICS_FILE, USAGE_FILE, result_folder
from recipes.contracts.tokenizer_reference import find_recipe
from recipes.storage import uris
from recipes.storage.artifact_store import MANIFEST_FILE, BrokenArtifact, Store
from recipes.storage.locations import chunk_folder, parse_chunk_hash, resolve_uri
from recipes.storage.manifest import Artifact, LineSelection
from resources.errors import ErrorCode, HanzoError, conflict

EXIT_DOCUMENT = "exit.json"
"""Last part of the URI of an attempt's exit document, in its folder (`recipes.storage.uris.attempt_folder`)."""
PODS_FOLDER = "_pods"
"""A folder next to the result of a preparation, through which its pods exchange data."""
BASE_MODELS = f"{uris.MODELS}/base"
MAX_CACHED_SCOPES = 1024
MAX_SELECTION_DEPTH = 8
"""Limit for selections from files that are selections themselves."""


@dataclass(frozen=True)
class ProgramScope:
    """The folders and objects of one program.

    A place covers the object of that name and everything below it.

    Args:
        readable: places that may be read in addition to the writable ones.
        writable: places that the newest attempt may write.
        logs: the program's folder; an attempt writes to its own folder in it.
        creatable: places that are written only once, until their manifest exists.
        chunk_folders: of the inputs' organizations; their chunks may be read by hash, but not listed.
        result_uri: the result document.
    """

    readable: tuple[str, ...]
    writable: tuple[str, ...]
    logs: str
    creatable: tuple[str, ...]
    chunk_folders: tuple[str, ...]
    result_uri: str

    def may_read(self, uri: str) -> bool:
        places = (*self.readable, *self.writable, *self.creatable, self.logs)
        is_chunk = parse_chunk_hash(uri) is not None and any(is_within(uri, folder) for folder in self.chunk_folders)
        return is_chunk or is_base_model(uri) or any(is_within(uri, place) for place in places)

    def check_write(self, uri: str, attempt: int) -> None:
        """Check that an attempt may write here.

        Raises HanzoError: 403 if it is no output, or another attempt's.
        """
        if is_within(uri, self.logs):
            if not is_within(uri, f"{self.logs}/{attempt:06d}"):
                raise refusal(f"{uri} does not belong to attempt {attempt}: an attempt writes to its own folder only")
        elif not any(is_within(uri, place) for place in (*self.writable, *self.creatable)):
            raise refusal(f"{uri} is not an output of this job: only its outputs, its result and its logs can be written")

    def check_create(self, uri: str, store: Store) -> None:
        """Check that an object may be created.

        Raises HanzoError: 409 if it is part of a complete shared artifact.
        """
        for place in self.creatable:
            if is_within(uri, place) and store.exists(f"{place}/{MANIFEST_FILE}"):
                raise conflict(f"{place} already exists and is shared by jobs: it cannot be overwritten")

    def is_committed(self, uri: str) -> bool:
        """Return whether an object may be written only through this server, which limits its size.

        Such an object makes others visible, ends the job, or is read whole by the control plane.
        """
        committed = (MANIFEST_FILE, EXIT_DOCUMENT, USAGE_FILE, UNSENT_METRICS_FILE)
        return uri == self.result_uri or uri.rpartition("/")[2] in committed

    def is_own_log(self, uri: str, attempt: int) -> bool:
        """Return whether this is a log of the attempt.

        The attempt may complete it even after a newer one has begun.
        """
        return is_within(uri, f"{self.logs}/{attempt:06d}") and not self.is_committed(uri)


def program_scope(job: Job) -> ProgramScope:
    """Return the scope that follows from the job document alone."""
    run = (uris.run_folder(job.tracking.run_id), uris.run_checkpoints(job.tracking.run_id)) if job.tracking else ()
    inputs = tuple(strip(artifact.uri) for artifact in job.inputs.values())
    outputs = tuple(strip(uri) for uri in job.outputs.values())
    names = (USAGE_FILE, UNSENT_METRICS_FILE) if job.tracking else (PODS_FOLDER,) if job.program is Program.PREPARE else ()
    beside_result = tuple(f"{result_folder(job)}/{name}" for name in names)
    return ProgramScope(
        readable=(*inputs, *run),
        writable=(*outputs, *(f"{uri}.index" for uri in outputs), *beside_result, job.result_uri),
        logs=uris.program_folder(job.id, job.program.value),
        # All organizations trust base models by name: a pod that runs its user's code must not write one.
        creatable=() if runs_user_code(job) else tuple(uris.base_model(sha256) for sha256 in pinned_base_models(job)),
        chunk_folders=tuple({chunk_folder(uri) for uri in inputs if is_within(uri, uris.DATASETS)}),
        result_uri=job.result_uri,
    )


def runs_user_code(job: Job) -> bool:
    """Whether users can run their own code: by command, image, variables or volumes."""
    recipe = job.parameters.get("recipe")
    image = isinstance(recipe, dict) and recipe.get("image")
    return job.program is Program.COMMAND or bool(image) or bool(job.env) or bool(job.pod.volumes)


class ProgramScopes:
    """Caches scopes that include the origins of inputs.

    Origins are read from the store, and never change for the same work.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._resolved: dict[str, ProgramScope] = {}

    def check_read(self, job: Job, uri: str) -> None:
        """Check that the job may read an object.

        Raises HanzoError: 403 if it is neither an input nor an output.
        """
        scope = program_scope(job)
        if not scope.may_read(uri):
            key = f"{job.id}/{job.program}/{job.work_digest}"
            known = self._resolved.get(key)
            if known is None:
                if len(self._resolved) >= MAX_CACHED_SCOPES:
                    self._resolved.clear()
                known = self._resolved[key] = with_origins(scope, job, self._store)
            if not known.may_read(uri):
                raise refusal(f"{uri} is neither an input nor an output of this job")


def with_origins(scope: ProgramScope, job: Job, store: Store) -> ProgramScope:
    """Add the artifacts from which the job's inputs select lines.

    They are verified by the digest in the input's manifest.

    Raises:
        StoreUnavailable: the store does not answer.
    """
    origins = {uri for artifact in job.inputs.values() for uri in list_origins(store, artifact)}
    return replace(scope, readable=(*scope.readable, *sorted(origins)))


def list_origins(store: Store, artifact: Artifact, depth: int = MAX_SELECTION_DEPTH) -> set[str]:
    """Return the URIs of the artifacts of the organization from which an artifact selects lines."""
    if not is_within(artifact.uri, uris.DATASETS) or not depth:
        return set()
    found: set[str] = set()
    try:
        selections = {file.selection.of: file.selection for file in store.manifest(artifact).files if file.selection}
        for selection in selections.values():
            found |= follow_selection(store, artifact, selection, depth)
    except BrokenArtifact:
        return found  # the program finds the same problem, and reports it
    return found


def follow_selection(store: Store, artifact: Artifact, selection: LineSelection, depth: int) -> set[str]:
    uri, manifest = store.origin(artifact.uri, selection)
    uri = normalize_uri(store, uri)
    if not is_within(uri, uris.DATASETS) or chunk_folder(uri) != chunk_folder(artifact.uri):
        return set()
    origin = Artifact(kind=manifest.kind, uri=uri, digest=selection.of, size_bytes=manifest.size_bytes)
    return {uri} | list_origins(store, origin, depth - 1)


def pinned_base_models(job: Job) -> Iterable[str]:
    """Yield the SHA-256 of the base models that the job may have to resolve.

    Its recipe's or its tokenizer's.
    """
    parameters = job.parameters
    recipe, tokenize = parameters.get("recipe"), parameters.get("tokenize")
    if isinstance(recipe, dict) and isinstance(base := recipe.get("base_model"), dict) and base.get("sha256"):
        yield str(base["sha256"])
    with suppress(BadConfiguration):  # the recipe no longer exists: the program reports it
        if isinstance(tokenize, dict) and (named := find_recipe(str(tokenize.get("tokenizer", "")))) is not None:
            yield from filter(None, [named.base_model.sha256])


def normalize_uri(store: Store, uri: str) -> str:
    """Return a logical URI in its canonical form.

    Raises BrokenArtifact: it is not a URI of the store.
    """
    key = resolve_uri(store.address, uri).key
    return f"s3://{uri.removeprefix('s3://').partition('/')[0]}/{key}"


def is_within(uri: str, place: str) -> bool:
    return uri == place or uri.startswith(f"{place}/")


def is_base_model(uri: str) -> bool:
    """Return whether a URI is within a base model.

    All organizations share base models, and find them only by hash.
    """
    return len(uri.removeprefix(f"{BASE_MODELS}/").split("/")[0]) == 64 and uri.startswith(f"{BASE_MODELS}/")


def strip(uri: str) -> str:
    return uri.rstrip("/")


def refusal(message: str) -> HanzoError:
    return HanzoError(ErrorCode.PERMISSION_DENIED, message)
