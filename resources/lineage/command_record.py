"""The record of a command's run: what it was asked to run, of which code and on which data.

A script says of these what it likes, often nothing. What the job file named is known, and is said for it.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import JsonValue
from sqlalchemy import Connection, select

from recipes.storage import uris
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact
from resources.metadata.database import Database
from resources.metadata.datasets import DatasetVersion
from resources.metadata.jobs import DATASET, JobRecord
from resources.metadata.resumed import RESUMED
from resources.metadata.tables import runs
from resources.metadata.told_config import told_config
from resources.metadata.tracking.run_data import RunData
from resources.metadata.tracking.run_inputs import CONTEXT_TAG, Dataset, DatasetInput, Inputs
from resources.metadata.tracking_rules import MAX_DATASET_DIGEST

USES = {"training": "train", "eval": "test"}
"""What a job's dataset is to its run, by the type that was submitted: in the lineage, where training counts as learning."""
CONTEXTS = {"training": "training", "eval": "evaluation"}
"""The same in MLflow's words."""


def write_command_record(store: Store, job: JobRecord, inputs: Mapping[str, Artifact]) -> Artifact:
    """The record as an artifact, by which lineage knows the run. A run that has one keeps it.

    Args:
        inputs: what the job is handed, by role.
    """
    uri = uris.run_record(job.id)
    if found := store.find(uri):
        return found
    asked = {key: value for key, value in told_config(job.config).items() if key != RESUMED}
    facts: dict[str, JsonValue] = {"run_id": job.id, "command": list(job.config["command"])}
    if commit := job.config.get("git_commit"):
        facts["git_commit"] = commit
    used = {USES.get(asked["type"], role) if role == DATASET else role: each.digest for role, each in inputs.items()}
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "command.json").write_text(json.dumps(asked, indent=1, sort_keys=True))
        return store.publish(Path(scratch), uri, "run", inputs=used, facts=facts)


def digest_of(version: DatasetVersion) -> str:
    """The digest of a version's records, as far as MLflow has room for it."""
    return version.artifact.digest[:MAX_DATASET_DIGEST]


def tell_input(database: Database, job: JobRecord, version: DatasetVersion) -> None:
    """The dataset as an input of the run, once. Nothing is told of a run that somebody deleted."""
    context = CONTEXTS.get(job.config["type"])
    tags = {"version": str(version.version), **({CONTEXT_TAG: context} if context else {})}
    source = json.dumps({"uri": version.storage_path})
    found = Dataset(version.name, digest_of(version), "s3", source, profile=json.dumps({"num_records": version.num_records}))
    with database.write() as connection:
        if is_active(connection, job.id):
            Inputs(database).log(job.id, [DatasetInput(found, tags)], connection=connection)


def tell_end(
    connection: Connection,
    database: Database,
    job: JobRecord,
    version: DatasetVersion | None,
    tags: Sequence[tuple[str, str]],
) -> None:
    """The params by which a recipe's run says the same, and tags, in the transaction that completes the job.

    Not before: a param never changes, and a script that logs one called `dataset` would be refused it. What it has logged
    stays as it is.
    """
    data = {"dataset": version.name, "dataset_version": str(version.version)} if version else {}
    commit = job.config.get("git_commit")
    values = {**data, **({"git_commit": commit} if commit else {})}
    if is_active(connection, job.id):
        run_data = RunData(database)
        logged = run_data.params(job.id, connection=connection)
        missing = [(key, value) for key, value in values.items() if key not in logged]
        run_data.log_batch(job.id, params=missing, tags=tags, connection=connection)


def is_active(connection: Connection, run_id: str) -> bool:
    return connection.execute(select(runs.c.lifecycle_stage).where(runs.c.id == run_id)).scalar() == "active"
