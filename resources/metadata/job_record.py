"""A job as it is recorded: what was asked for, and how it stands."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recipes.contracts.job import Program, Schedule
from recipes.contracts.results import trained_role
from recipes.storage.manifest import Artifact
from resources.metadata.resumed import RESUMED, Resumed

TRAINING, PREPARATION, COMMAND = "training", "preparation", "command"
"""Types of jobs."""
PROGRAMS = {TRAINING: Program.TRAIN, PREPARATION: Program.PREPARE, COMMAND: Program.COMMAND}
REPLAY_OF = "replay_of"
"""Key of a job's configuration: the run that it repeats."""


@dataclass(frozen=True)
class JobRecord:
    """A row of the jobs table; times in milliseconds."""

    id: str
    name: str
    type: str
    status: str
    config: Mapping[str, Any]
    user_id: str
    organization: str
    submitted_at: int
    started_at: int | None
    ended_at: int | None
    reason: str
    artifacts: Mapping[str, Any]
    evaluation: Mapping[str, Any] | None

    @property
    def program(self) -> Program:
        """What runs the job: with its id, the key by which compute backends know it."""
        return PROGRAMS[self.type]

    @property
    def schedule(self) -> Schedule:
        """The limits that its submission gave."""
        return Schedule.model_validate(self.config.get("schedule") or {})

    @property
    def replay_of(self) -> str | None:
        """The run that this job repeats, to compare with. What it makes is no new model."""
        original = self.config.get(REPLAY_OF)
        return None if original is None else str(original)

    @property
    def resumed(self) -> Resumed:
        return Resumed.model_validate(self.config.get(RESUMED) or {})

    def artifact(self, role: str) -> Artifact:
        return Artifact.model_validate(self.artifacts[role])

    @property
    def trained(self) -> Artifact:
        """What training left, an adapter or weights. Raises KeyError of a job that is not trained."""
        return self.artifact(trained_role(self.artifacts))
