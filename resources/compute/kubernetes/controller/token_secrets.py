"""Tokens of programs: one for each Secret, however often its creation is tried."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from recipes.contracts.job import Job
from resources.jobs.job_tokens import TOKEN_VARIABLE
from resources.jobs.program_tokens import ClusterCredentials
from resources.metadata.cluster_jobs import GenerationKey


@dataclass(frozen=True)
class IssuedToken:
    """`was_tried`: an earlier request may have created the Secret with it."""

    token: str
    was_tried: bool = False


class TokenSecrets:
    def __init__(self, credentials: ClusterCredentials) -> None:
        self._credentials = credentials
        self._issued: dict[GenerationKey, IssuedToken] = {}

    def issue(self, key: GenerationKey, job: Job) -> str:
        """The token that the Secret of a generation is created with; the same one until `settle`."""
        if key not in self._issued:
            self._issued[key] = IssuedToken(self._credentials.issue(job)[TOKEN_VARIABLE])
        return self._issued[key].token

    def keep(self, key: GenerationKey) -> None:
        """The creation failed, or may have: the next attempt uses the same token."""
        self._issued[key] = replace(self._issued[key], was_tried=True)

    def settle(self, key: GenerationKey, *, is_used: bool) -> None:
        """The creation is over. A token that no Secret holds is withdrawn."""
        issued = self._issued.pop(key)
        if not is_used and not issued.was_tried:
            self._credentials.withdraw(issued.token)

    def forget(self, active: Collection[GenerationKey]) -> None:
        """Drop what is cached of all other jobs: their tokens are revoked with their objects."""
        for key in self._issued.keys() - active:
            del self._issued[key]
