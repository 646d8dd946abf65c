"""A job record, its resume history, and its masked configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from recipes.contracts.frozen_model import FrozenModel
from recipes.contracts.job import Program, Schedule
from recipes.contracts.pod_settings import PodSettings
from recipes.contracts.results import find_trained_role
from recipes.contracts.rewind import Rewind
from recipes.storage.manifest import Artifact

# The history of a job after it ended for the first time: how often and how it was resumed. It is stored in the job's
# configuration, next to what was submitted.

RESUMED_KEY = "resumed"
"""The key of the history in a job's configuration."""


class ResumeHistory(FrozenModel):
    """How a job was resumed.

    `sent_back` are the rewinds of the run, oldest first. `gpus` is the number of GPUs that it resumed with last,
    `gpus_before` the earlier numbers, oldest first.
    """

    times: int = 0
    sent_back: tuple[Rewind, ...] = ()
    gpus: int | None = None
    gpus_before: tuple[int, ...] = Field((), exclude_if=lambda value: not value)


# A job's configuration as it is shown to others: the values of its variables may be secrets, which only its program needs.
#
# The job's own row keeps them, so that it can be started and resumed.

ENV_KEY = "env"
MASK = "********"
UNMASKED_VARIABLES = frozenset({"HANZO_ML_EXPERIMENT"})
"""Variables whose values are visible in the job's run anyway."""


def mask_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with the values of its variables masked."""
    env = config.get(ENV_KEY)
    if not isinstance(env, Mapping):
        return dict(config)
    return {**config, ENV_KEY: {name: value if name in UNMASKED_VARIABLES else MASK for name, value in env.items()}}


def mask_payload(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event's payload with a masked configuration.

    Old events were written before configurations were masked.
    """
    config = payload.get("config")
    return {**payload, "config": mask_config(config)} if isinstance(config, Mapping) else dict(payload)


TRAINING, PREPARATION, COMMAND = "training", "preparation", "command"
"""Types of jobs."""
PROGRAMS = {TRAINING: Program.TRAIN, PREPARATION: Program.PREPARE, COMMAND: Program.COMMAND}
REPLAY_OF = "replay_of"
"""Key in a job's configuration of the run that it repeats."""


@dataclass(frozen=True)
class JobRecord:
    """A row of the jobs table; times in milliseconds since 1970."""

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
        """The program of the job.

        Together with the job's id, it is the key by which compute backends identify it.
        """
        return PROGRAMS[self.type]

    @property
    def schedule(self) -> Schedule:
        """The limits that were submitted."""
        return Schedule.model_validate(self.config.get("schedule") or {})

    @property
    def env(self) -> Mapping[str, str]:
        """The variables that were submitted."""
        return self.config.get(ENV_KEY) or {}

    @property
    def pod(self) -> PodSettings:
        """The pod settings that were submitted."""
        return PodSettings.model_validate(self.config.get("pod") or {})

    @property
    def replay_of(self) -> str | None:
        """The run that this job repeats for a comparison, or None.

        A replay creates no new model.
        """
        original = self.config.get(REPLAY_OF)
        return None if original is None else str(original)

    @property
    def resumed(self) -> ResumeHistory:
        return ResumeHistory.model_validate(self.config.get(RESUMED_KEY) or {})

    def artifact(self, role: str) -> Artifact:
        return Artifact.model_validate(self.artifacts[role])

    @property
    def trained(self) -> Artifact:
        """The result of training: an adapter or weights. Raises KeyError: the job is not trained."""
        return self.artifact(find_trained_role(self.artifacts))


UNSUBMITTED = "0" * 32
"""Used as the id of a job that is only checked: ids are assigned at submission."""


def unsubmitted_job(name: str, type: str, config: Mapping[str, Any], user: str, organization: str) -> JobRecord:
    """Return a job as it would be queued."""
    return JobRecord(
        id=UNSUBMITTED,
        name=name,
        type=type,
        status="queued",
        config=config,
        user_id=user,
        organization=organization,
        submitted_at=0,
        started_at=None,
        ended_at=None,
        reason="",
        artifacts={},
        evaluation=None,
    )
