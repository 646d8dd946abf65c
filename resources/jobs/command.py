"""Store submitted command jobs with their source files, and build their compute jobs.

`recipes.contracts.command_job` defines the job file.
"""

import hashlib
import shlex
import uuid
from typing import Any

from recipes.contracts.command_job import CommandJob, SourceTree
from recipes.contracts.job import CheckpointPolicy, Job, Program, StoreAddress, Tracking
from recipes.storage import uris
from recipes.storage.artifact_store import MANIFEST_FILE, Store
from recipes.storage.folder_tree import FOLDER_MODE, code_index_uri, default_code_mode, put_times
from recipes.storage.manifest import Artifact, FileRecord, FolderRecord, LinkRecord, Manifest
from recipes.storage.object_names import object_name
from resources.lineage.edges import record_artifact
from resources.metadata.database import Database
from resources.metadata.field_rules import COMMIT_TAG, SOURCE_NAME_TAG, SOURCE_TYPE_TAG, refuse_unstorable
from resources.metadata.job_record import RESUMED_KEY
from resources.metadata.jobs import COMMAND, DATASET_KEY, JobRecord, Jobs

CODE = "code"
SOURCE_KEYS = {"files", "source_tree"}
"""Keys of a job file whose values are kept in the object store."""
DERIVED_KEYS = {CODE, DATASET_KEY, RESUMED_KEY}
"""Configuration keys that are not in the job file: source files, named dataset version, resume history."""


def submit_command(
    database: Database, store: Store, job: CommandJob, user: str, organization: str, id: str | None = None
) -> JobRecord:
    """Queue a command job, after storing its source files under their digest.

    If a job with that `id` exists, it stays unchanged. Its files do too, because they are stored by digest: otherwise the
    later of two concurrent submissions would replace the other's.
    """
    refuse_unstorable(job.model_dump(mode="json", exclude=SOURCE_KEYS), "config")  # before storing anything
    identifier = id or uuid.uuid4().hex
    code = code_manifest(job)
    uri = uris.run_code(identifier, code.digest)
    contents = source_contents(job)
    for file in code.files:
        store.put_bytes(f"{uri}/{file.object_path}", contents[file.path])
    if has_code(code):
        if job.source_tree.modified_ns:
            put_times(store, code_index_uri(uri), job.source_tree.modified_ns)
        store.put_manifest(uri, code)
    config = stored_config(job, identifier)
    with database.write() as connection:
        stored = Jobs(database).submit(
            name=job.name,
            config=config,
            user=user,
            organization=organization,
            id=identifier,
            type=COMMAND,
            experiment=job.experiment,
            tags=code_tags(job),
            connection=connection,
        )
        is_kept = stored.config.get(CODE) == config.get(CODE)
        if has_code(code) and is_kept:
            record_artifact(connection, Artifact.model_validate(config[CODE]), code)
    if not is_kept:
        store.delete(uri)
        store.delete(code_index_uri(uri))
    return stored


def code_tags(job: CommandJob) -> dict[str, str]:
    """Return the run tags that describe its code, in MLflow's format."""
    commit = {COMMIT_TAG: job.git_commit} if job.git_commit else {}
    return {SOURCE_NAME_TAG: shlex.join(job.command), SOURCE_TYPE_TAG: "JOB", **commit}


def stored_config(job: CommandJob, identifier: str) -> dict[str, Any]:
    """Return the stored configuration: the job file, with source files replaced by their artifact."""
    config = job.model_dump(mode="json", exclude=SOURCE_KEYS, exclude_none=True)
    if job.storage.dataset:
        config[DATASET_KEY] = job.storage.dataset
    if has_code(code := code_manifest(job)):
        uri = uris.run_code(identifier, code.digest)
        config[CODE] = Artifact(kind=CODE, uri=uri, digest=code.digest, size_bytes=code.size_bytes).model_dump()
    return config


def source_contents(job: CommandJob) -> dict[str, bytes]:
    """Return the bytes of each source file by path."""
    return {**{path: text.encode() for path, text in job.files.items()}, **job.source_tree.encoded}


def code_manifest(job: CommandJob) -> Manifest:
    """Return the manifest of the source files, with modes, links and empty folders, without times."""
    tree: SourceTree = job.source_tree
    contents = source_contents(job)
    # Text files keep their path as object name, as ever, so that digests of earlier jobs stay valid.
    named = {path: "" for path in job.files if path.rpartition("/")[2] == MANIFEST_FILE}
    files = [describe_source(path, data, tree.modes.get(path), named.get(path)) for path, data in sorted(contents.items())]
    modes = {path: mode for path, mode in tree.modes.items() if path not in contents and mode != FOLDER_MODE}
    folders = sorted({*tree.folders, *modes})
    return Manifest(
        kind=CODE,
        files=tuple(files),
        folders=tuple(FolderRecord(path=path, mode=modes.get(path)) for path in folders),
        links=tuple(LinkRecord(path=path, target=target) for path, target in sorted(tree.links.items())),
    )


def describe_source(path: str, data: bytes, mode: int | None, object: str | None) -> FileRecord:
    sha256 = hashlib.sha256(data).hexdigest()
    recorded_mode = None if mode == default_code_mode(data) else mode
    place = object_name(path, sha256, len(data)) if object is None else object
    return FileRecord(path=path, sha256=sha256, size=len(data), mode=recorded_mode, object=place)


def has_code(code: Manifest) -> bool:
    return bool(code.files or code.folders or code.links)


def read_command(job: JobRecord) -> CommandJob:
    """Return the job file of a submitted job, without its source files."""
    return CommandJob.model_validate({key: value for key, value in job.config.items() if key not in DERIVED_KEYS})


def checkpoint_policy(command: CommandJob) -> CheckpointPolicy:
    return CheckpointPolicy().for_schedule(command.schedule)


def plan_command(job: JobRecord, dataset: Artifact | None, *, store: StoreAddress, tracking_uri: str, cache_dir: str) -> Job:
    """Return the compute job of a command."""
    command = read_command(job)
    inputs = {CODE: Artifact.model_validate(job.config[CODE])} if CODE in job.config else {}
    return Job(
        id=job.id,
        program=Program.COMMAND,
        inputs={**inputs, **({DATASET_KEY: dataset} if dataset else {})},
        parameters={
            "script": command.script.model_dump(mode="json"),
            "experiment": command.experiment,
            DATASET_KEY: command.storage.dataset,
        },
        outputs={"checkpoints": command.storage.checkpoints_uri(job.id)},
        result_uri=uris.run_result(job.id, "command"),
        store=store,
        cache_dir=cache_dir,
        tracking=Tracking(uri=tracking_uri, run_id=job.id),
        hardware=command.resources,
        distributed=command.distributed,
        checkpoint=checkpoint_policy(command),
        schedule=command.schedule,
        pod=command.pod,
    )
