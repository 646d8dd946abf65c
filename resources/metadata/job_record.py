"""A job as it is recorded, how it was resumed, and its masked configuration."""

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

# What became of a job after it had ended: how often it was resumed, and how. Its configuration says so, beside what was
# submitted.

RESUMED_KEY = "resumed"
"""The key of a job's configuration."""


class ResumeHistory(FrozenModel):
    """`sent_back` is all that the run was sent back to, oldest first; `gpus` how many it goes on with now, and `gpus_before`
    with how many it went on at other times, oldest first.
    """

    times: int = 0
    sent_back: tuple[Rewind, ...] = ()
    gpus: int | None = None
    gpus_before: tuple[int, ...] = Field((), exclude_if=lambda value: not value)


# A job's configuration as others are told it: the values of its variables may be secrets, which its program alone needs.
#
# They stay in the job's own row, so that it can be started and resumed.

ENV_KEY = "env"
MASK = "********"
UNMASKED_VARIABLES = frozenset({"HANZO_ML_EXPERIMENT"})
"""Variables that say what everybody can see of the job's run."""


def mask_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same with the names of its variables alone."""
    env = config.get(ENV_KEY)
    if not isinstance(env, Mapping):
        return dict(config)
    return {**config, ENV_KEY: {name: value if name in UNMASKED_VARIABLES else MASK for name, value in env.items()}}


def mask_payload(payload: Mapping[str, Any]) -> dict[str, Any]:
    """An event's payload with the configuration as it is told: some were written before it was masked."""
    config = payload.get("config")
    return {**payload, "config": mask_config(config)} if isinstance(config, Mapping) else dict(payload)


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
    def env(self) -> Mapping[str, str]:
        """The variables that its submission gave."""
        return self.config.get(ENV_KEY) or {}

    @property
    def pod(self) -> PodSettings:
        """What its submission said of its pods."""
        return PodSettings.model_validate(self.config.get("pod") or {})

    @property
    def replay_of(self) -> str | None:
        """The run that this job repeats, to compare with. What it makes is no new model."""
        original = self.config.get(REPLAY_OF)
        return None if original is None else str(original)

    @property
    def resumed(self) -> ResumeHistory:
        return ResumeHistory.model_validate(self.config.get(RESUMED_KEY) or {})

    def artifact(self, role: str) -> Artifact:
        return Artifact.model_validate(self.artifacts[role])

    @property
    def trained(self) -> Artifact:
        """What training left, an adapter or weights. Raises KeyError of a job that is not trained."""
        return self.artifact(find_trained_role(self.artifacts))


UNSUBMITTED = "0" * 32
"""Stands for the id of a job that is only checked: ids are made when jobs are submitted."""


def unsubmitted_job(name: str, type: str, config: Mapping[str, Any], user: str, organization: str) -> JobRecord:
    """A job as it would be queued."""
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
