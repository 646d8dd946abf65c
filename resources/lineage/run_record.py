"""The record of a training run: everything needed to run it again, written once before it starts.

It is an artifact of its own, so that a model's chain passes through it: recipe, seeds, data, lock file, git commit.
"""

import hashlib
import json
import platform
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, JsonValue, ValidationError

from recipes.contracts.job import Hardware
from recipes.contracts.recipe import Recipe
from recipes.contracts.recovery_log import Incident
from recipes.contracts.validation_errors import first_problem
from recipes.storage import uris
from recipes.storage.artifact_store import BrokenArtifact, Store
from recipes.storage.manifest import Artifact

RECORD_FILE = "run.json"
LOCK_FILE = "requirements.lock"
COMMIT_FILE = "COMMIT"
"""Beside the code in an image, which has no git: what it was built from (deploy/Containerfile)."""
NO_COMMIT = "none"
"""Of a folder without git."""


class Environment(BaseModel, frozen=True):
    """The code that ran: `git_dirty` says that tracked files differed from the commit, `git_diff_sha256` how.

    On what it ran, and with which packages, only the program itself can say: see `Result.machine`.
    """

    git_commit: str
    git_dirty: bool
    git_diff_sha256: str = ""
    lock_sha256: str
    python: str


class RunRecord(BaseModel, frozen=True):
    """What decided a run.

    Of a replay: `replay_of` is the run that it repeats, `threads` how many that one computed with on its processor, since
    sums in another order are other sums, and `repeats` what that one was healed of: smaller micro-batches are other sums
    too, and samples that it left out are left out again.
    """

    run_id: str
    model: str
    dataset: str
    recipe: Recipe
    seed: int
    environment: Environment
    replay_of: str | None = None
    repeats: tuple[Incident, ...] = ()
    threads: int | None = None

    @property
    def hardware(self) -> Hardware:
        """What the run asks for."""
        asked = self.recipe.hardware
        return asked if self.threads is None else asked.model_copy(update={"cpu": self.threads})


def read_environment(source: Path) -> Environment:
    """The environment of a checkout, or of an image; a folder that is neither says `NO_COMMIT`."""
    commit = git(source, "rev-parse", "HEAD")
    changes = git(source, "diff", "HEAD") if commit else ""
    lock = source / LOCK_FILE
    return Environment(
        git_commit=commit or commit_of_image(source),
        git_dirty=bool(changes),
        git_diff_sha256=hashlib.sha256(changes.encode()).hexdigest() if changes else "",
        lock_sha256=hashlib.sha256(lock.read_bytes()).hexdigest() if lock.is_file() else "none",
        python=platform.python_version(),
    )


def commit_of_image(source: Path) -> str:
    file = source / COMMIT_FILE
    text = file.read_text().strip() if file.is_file() else ""
    return text if re.fullmatch(r"[0-9a-f]{40,64}", text) else NO_COMMIT


def git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, errors="replace", check=False
        )
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def write_record(store: Store, record: RunRecord, inputs: dict[str, str]) -> Artifact:
    """The record as an artifact. A run that has one keeps it: a resumed run is the run that was started."""
    uri = uris.run_record(record.run_id)
    if found := store.find(uri):
        return found
    with tempfile.TemporaryDirectory() as scratch:
        text = json.dumps(record.model_dump(mode="json"), indent=1, sort_keys=True)
        (Path(scratch) / RECORD_FILE).write_text(text)
        facts: dict[str, JsonValue] = {
            "run_id": record.run_id,
            "recipe": record.recipe.name,
            "seed": record.seed,
            "git_commit": record.environment.git_commit,
            "lock_sha256": record.environment.lock_sha256,
            **({"replay_of": record.replay_of} if record.replay_of else {}),
        }
        return store.publish(Path(scratch), uri, "run", inputs=inputs, facts=facts)


def read_record(store: Store, artifact: Artifact) -> RunRecord:
    """The record as it was written: one that was changed since would run, and prove, something else.

    Raises:
        BrokenArtifact: its manifest has another digest than the artifact, it has another hash than its manifest says, or it
            is of a release whose records this one cannot read.
    """
    where = f"{artifact.uri}/{RECORD_FILE}"
    recorded = next((file.sha256 for file in store.manifest(artifact).files if file.path == RECORD_FILE), None)
    try:
        raw = store.get_bytes(where)
    except FileNotFoundError:
        raise BrokenArtifact(f"{where} is missing") from None
    if (found := hashlib.sha256(raw).hexdigest()) != recorded:
        raise BrokenArtifact(f"{where} was changed since the run: it has SHA-256 {found}, recorded is {recorded}")
    try:
        return RunRecord.model_validate_json(raw)
    except ValidationError as error:
        raise BrokenArtifact(f"{where} is no record that this release can read: {first_problem(error, RunRecord)}") from None


def changed_values(store: Store, artifact: Artifact, logged: Mapping[str, str]) -> tuple[str, ...]:
    """Of a record that was changed, the values that the run began with otherwise: those that it `logged` as parameters."""
    try:
        recipe = RunRecord.model_validate_json(store.get_bytes(f"{artifact.uri}/{RECORD_FILE}")).recipe
    except (FileNotFoundError, ValidationError):
        return ()
    pairs = (
        (key, then, as_logged(getattr(recipe, key))) for key, then in sorted(logged.items()) if key in Recipe.model_fields
    )
    return tuple(f"{key} was {then}, and is {now}" for key, then, now in pairs if now != then)


def as_logged(value: object) -> str:
    """A value of a recipe as a parameter of its run: as MLflow's clients write it, whose tuples are lists in YAML."""
    return str(list(value) if isinstance(value, tuple) else value)
