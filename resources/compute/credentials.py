"""Credentials of a job's program: what a backend issues at each attempt, and revokes at the end."""

from collections.abc import Mapping
from typing import Protocol

from recipes.contracts.job import Job


class Credentials(Protocol):
    """Credentials of a job's program, as environment variables: its job file is readable by others."""

    def issue(self, job: Job) -> Mapping[str, str]:
        """Issue credentials for one attempt and revoke those of earlier attempts."""
        ...

    def is_valid(self, job: Job, token: str) -> bool:
        """Whether an attempt that has this token can keep using it."""
        ...

    def renew(self, job: Job) -> None:
        """Extend the validity while the program runs."""
        ...

    def revoke(self, job: Job) -> None:
        """Revoke the credentials once the job has ended for good."""
        ...


class NoCredentials:
    """For programs that call no server."""

    def issue(self, job: Job) -> Mapping[str, str]:
        return {}

    def is_valid(self, job: Job, token: str) -> bool:
        return True

    def renew(self, job: Job) -> None:
        pass

    def revoke(self, job: Job) -> None:
        pass
