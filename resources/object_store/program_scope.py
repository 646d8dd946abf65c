"""Which objects the pods of a program may read and write: what the job document names, and nothing else.

Reads: the job's inputs and what their manifests select from, its outputs, its result, its run's folders, base models.
Writes: declared outputs, the result, usage and unsent metrics beside it, logs of the caller's own attempt, and a base model
that the recipe pins and that is not there yet.
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
"""Beside the result of a preparation: what its pods exchange."""
BASE_MODELS = f"{uris.MODELS}/base"
MAX_CACHED_SCOPES = 1024
MAX_SELECTION_DEPTH = 8
"""Of selections from files that are selections themselves."""


@dataclass(frozen=True)
class ProgramScope:
    """Folders and objects of one program. A place covers the object of that name and everything below it.

    Args:
        readable: places that are read in addition to the writable ones.
        writable: places that are written by the newest attempt.
        logs: folder of the program; an attempt writes to its own folder there.
        creatable: places that are written once: never again when their manifest exists.
        chunk_folders: of the inputs' organizations; their chunks are read by hash, and not listed.
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
        """Raises HanzoError: 403 for what is no output of the job, or belongs to another attempt."""
        if is_within(uri, self.logs):
            if not is_within(uri, f"{self.logs}/{attempt:06d}"):
                raise refusal(f"{uri} does not belong to attempt {attempt}: an attempt writes to its own folder only")
        elif not any(is_within(uri, place) for place in (*self.writable, *self.creatable)):
            raise refusal(f"{uri} is no output of this job: only its outputs, its result and its logs can be written")

    def check_create(self, uri: str, store: Store) -> None:
        """Raises HanzoError: 409 for a part of a shared artifact that is complete."""
        for place in self.creatable:
            if is_within(uri, place) and store.exists(f"{place}/{MANIFEST_FILE}"):
                raise conflict(f"{place} exists and is shared by jobs: it is never written again")

    def is_committed(self, uri: str) -> bool:
        """Whether it is only written through this server, which limits its size.

        It makes others visible, ends the job, or is read whole by the control plane.
        """
        committed = (MANIFEST_FILE, EXIT_DOCUMENT, USAGE_FILE, UNSENT_METRICS_FILE)
        return uri == self.result_uri or uri.rpartition("/")[2] in committed

    def is_own_log(self, uri: str, attempt: int) -> bool:
        """Whether it is a log of this attempt, which it may finish when a newer one has begun."""
        return is_within(uri, f"{self.logs}/{attempt:06d}") and not self.is_committed(uri)


def program_scope(job: Job) -> ProgramScope:
    """The scope that the job document alone decides."""
    run = (uris.run_folder(job.tracking.run_id), uris.run_checkpoints(job.tracking.run_id)) if job.tracking else ()
    inputs = tuple(strip(artifact.uri) for artifact in job.inputs.values())
    outputs = tuple(strip(uri) for uri in job.outputs.values())
    names = (USAGE_FILE, UNSENT_METRICS_FILE) if job.tracking else (PODS_FOLDER,) if job.program is Program.PREPARE else ()
    beside_result = tuple(f"{result_folder(job)}/{name}" for name in names)
    return ProgramScope(
        readable=(*inputs, *run),
        writable=(*outputs, *(f"{uri}.index" for uri in outputs), *beside_result, job.result_uri),
        logs=uris.program_folder(job.id, job.program.value),
        # All organizations trust a base model by its name: no pod writes one that runs code of its user.
        creatable=() if runs_user_code(job) else tuple(uris.base_model(sha256) for sha256 in pinned_base_models(job)),
        chunk_folders=tuple({chunk_folder(uri) for uri in inputs if is_within(uri, uris.DATASETS)}),
        result_uri=job.result_uri,
    )


def runs_user_code(job: Job) -> bool:
    """Whether its user can have a program run code of their own: a command, an image, or through variables and volumes."""
    recipe = job.parameters.get("recipe")
    image = isinstance(recipe, dict) and recipe.get("image")
    return job.program is Program.COMMAND or bool(image) or bool(job.env) or bool(job.pod.volumes)


class ProgramScopes:
    """Scopes with the origins of inputs, which take reads of the store and never change for the same work."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._resolved: dict[str, ProgramScope] = {}

    def check_read(self, job: Job, uri: str) -> None:
        """Raises HanzoError: 403 for what is neither an input nor an output of the job."""
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
    """Add the artifacts whose lines the job's inputs consist of, verified by the digest in the input's manifest.

    Raises:
        StoreUnavailable: the store does not answer.
    """
    origins = {uri for artifact in job.inputs.values() for uri in list_origins(store, artifact)}
    return replace(scope, readable=(*scope.readable, *sorted(origins)))


def list_origins(store: Store, artifact: Artifact, depth: int = MAX_SELECTION_DEPTH) -> set[str]:
    """URIs of the artifacts that an artifact selects lines from; those of its own organization only."""
    if not is_within(artifact.uri, uris.DATASETS) or not depth:
        return set()
    found: set[str] = set()
    try:
        selections = {file.selection.of: file.selection for file in store.manifest(artifact).files if file.selection}
        for selection in selections.values():
            found |= follow_selection(store, artifact, selection, depth)
    except BrokenArtifact:
        return found  # the program finds it broken as well, and says so
    return found


def follow_selection(store: Store, artifact: Artifact, selection: LineSelection, depth: int) -> set[str]:
    uri, manifest = store.origin(artifact.uri, selection)
    uri = normalize_uri(store, uri)
    if not is_within(uri, uris.DATASETS) or chunk_folder(uri) != chunk_folder(artifact.uri):
        return set()
    origin = Artifact(kind=manifest.kind, uri=uri, digest=selection.of, size_bytes=manifest.size_bytes)
    return {uri} | list_origins(store, origin, depth - 1)


def pinned_base_models(job: Job) -> Iterable[str]:
    """SHA-256 of the base models that the job may have to resolve: its recipe's, or that of its tokenizer's recipe."""
    parameters = job.parameters
    recipe, tokenize = parameters.get("recipe"), parameters.get("tokenize")
    if isinstance(recipe, dict) and isinstance(base := recipe.get("base_model"), dict) and base.get("sha256"):
        yield str(base["sha256"])
    with suppress(BadConfiguration):  # the recipe is not there any more: the program says so
        if isinstance(tokenize, dict) and (named := find_recipe(str(tokenize.get("tokenizer", "")))) is not None:
            yield from filter(None, [named.base_model.sha256])


def normalize_uri(store: Store, uri: str) -> str:
    """A logical URI in its one form. Raises BrokenArtifact: it is no URI of the store."""
    key = resolve_uri(store.address, uri).key
    return f"s3://{uri.removeprefix('s3://').partition('/')[0]}/{key}"


def is_within(uri: str, place: str) -> bool:
    return uri == place or uri.startswith(f"{place}/")


def is_base_model(uri: str) -> bool:
    """Base models are shared by all organizations, and found by their hash only."""
    return len(uri.removeprefix(f"{BASE_MODELS}/").split("/")[0]) == 64 and uri.startswith(f"{BASE_MODELS}/")


def strip(uri: str) -> str:
    return uri.rstrip("/")


def refusal(message: str) -> HanzoError:
    return HanzoError(ErrorCode.PERMISSION_DENIED, message)
