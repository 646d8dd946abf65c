"""Tokens of programs: one per Secret, even if its creation is retried."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from recipes.contracts.job import Job
from resources.jobs.job_tokens import TOKEN_VARIABLE
from resources.jobs.program_tokens import ClusterCredentials
from resources.metadata.cluster_jobs import GenerationKey


@dataclass(frozen=True)
class IssuedToken:
    """A token; `was_tried`: an earlier request may have created the Secret with it."""

    token: str
    was_tried: bool = False


class TokenSecrets:
    def __init__(self, credentials: ClusterCredentials) -> None:
        self._credentials = credentials
        self._issued: dict[GenerationKey, IssuedToken] = {}

    def issue(self, key: GenerationKey, job: Job) -> str:
        """Return the token for the Secret of a generation, the same until `settle`."""
        if key not in self._issued:
            self._issued[key] = IssuedToken(self._credentials.issue(job)[TOKEN_VARIABLE])
        return self._issued[key].token

    def keep(self, key: GenerationKey) -> None:
        """Keep the token for the next attempt after a creation that may have failed."""
        self._issued[key] = replace(self._issued[key], was_tried=True)

    def settle(self, key: GenerationKey, *, is_used: bool) -> None:
        """Finish a creation; withdraw the token if no Secret contains it."""
        issued = self._issued.pop(key)
        if not is_used and not issued.was_tried:
            self._credentials.withdraw(issued.token)

    def forget(self, active: Collection[GenerationKey]) -> None:
        """Drop cached data of all other jobs; their tokens are revoked with their objects."""
        for key in self._issued.keys() - active:
            del self._issued[key]
