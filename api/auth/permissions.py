"""Roles with their permissions, and the caller who has them."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from resources.jobs.job_tokens import JobGrant
from resources.metadata.registry.model_names import ModelKey
from resources.metadata.tracking.experiments import DEFAULT_ORGANIZATION


class Permission(StrEnum):
    """`KIND:ACTION` as in the specification, which implies the read permissions of jobs, models and sweeps."""

    SERVER_READ = "server:read"
    DATASETS_READ = "datasets:read"
    DATASETS_WRITE = "datasets:write"
    DATASETS_DELETE = "datasets:delete"
    EXPERIMENTS_READ = "experiments:read"
    EXPERIMENTS_WRITE = "experiments:write"
    EXPERIMENTS_DELETE = "experiments:delete"
    JOBS_READ = "jobs:read"
    JOBS_SUBMIT = "jobs:submit"
    JOBS_CANCEL = "jobs:cancel"
    JOBS_CANCEL_OWN = "jobs:cancel-own"
    JOBS_DELETE = "jobs:delete"
    MODELS_READ = "models:read"
    MODELS_REGISTER = "models:register"
    MODELS_PROMOTE = "models:promote"
    MODELS_ARCHIVE = "models:archive"
    HPO_READ = "hpo:read"
    HPO_CREATE = "hpo:create"
    HPO_CANCEL = "hpo:cancel"
    AUDIT_READ = "audit:read"
    ENGINE_PULL = "engine:pull"


P = Permission
VIEWER = frozenset({P.SERVER_READ, P.DATASETS_READ, P.EXPERIMENTS_READ, P.JOBS_READ, P.MODELS_READ, P.HPO_READ})
RESEARCHER = VIEWER | {
    P.DATASETS_WRITE,
    P.EXPERIMENTS_WRITE,
    P.JOBS_SUBMIT,
    P.JOBS_CANCEL_OWN,
    P.MODELS_REGISTER,
    P.HPO_CREATE,
}
ADMIN = "ml-admin"
ROLES: dict[str, frozenset[Permission]] = {
    ADMIN: frozenset(Permission) - {P.ENGINE_PULL},
    "ml-researcher": RESEARCHER,
    "ml-viewer": VIEWER,
}
JOB = "job"
ENGINE = "engine"
GRANTS = ROLES | {
    JOB: frozenset({P.SERVER_READ, P.EXPERIMENTS_READ, P.EXPERIMENTS_WRITE, P.DATASETS_READ, P.MODELS_READ}),
    ENGINE: frozenset({P.ENGINE_PULL}),
}
"""`ROLES` and two that no sign-in server can grant: of a job's own token, which `allows_jobs` and `job_tokens` restrict
further, and of the engine's token. The engine serves all organizations, so no organization's admin has its permission."""
OWN_ONLY = {P.JOBS_CANCEL: P.JOBS_CANCEL_OWN}
"""A permission -> the one that suffices for objects that the caller created."""


def required_permission(declared: Permission, body: Any) -> Permission:
    """Return the required permission: registering a version directly into a stage requires promotion."""
    if declared is P.MODELS_REGISTER and isinstance(body, dict) and body.get("stage") not in (None, "", "none"):
        return P.MODELS_PROMOTE
    return declared


@dataclass(frozen=True)
class Caller:
    """The calling user with organization and roles (of `GRANTS`); `job` if a job calls."""

    user_id: str
    organization: str
    roles: frozenset[str]
    job: JobGrant | None = None

    @property
    def is_admin(self) -> bool:
        return ADMIN in self.roles

    def model(self, name: str) -> ModelKey:
        """Return the key of a registered model name within the caller's organization."""
        return ModelKey(self.organization, name)

    def user_or(self, claimed: str) -> str:
        """Return the user to record: the one signed in; without sign-in, the claimed one."""
        return claimed if self is LOCAL else self.user_id

    def may(self, permission: Permission) -> bool:
        return any(permission in GRANTS[role] for role in self.roles)


LOCAL = Caller(user_id="local", organization=DEFAULT_ORGANIZATION, roles=frozenset({ADMIN}))
"""Every caller on loopback without sign-in, where callers cannot be distinguished; `api.server` opens no other address
in that mode."""
