"""Credentials of a job's program, issued for each attempt and revoked at the end."""

from collections.abc import Mapping
from typing import Protocol

from recipes.contracts.job import Job


class Credentials(Protocol):
    """Credentials as environment variables, because other users can read the job file."""

    def issue(self, job: Job) -> Mapping[str, str]:
        """Issue credentials for one attempt and revoke those of earlier attempts."""
        ...

    def is_valid(self, job: Job, token: str) -> bool:
        """Return whether an attempt can keep using this token."""
        ...

    def renew(self, job: Job) -> None:
        """Extend the validity while the program runs."""
        ...

    def revoke(self, job: Job) -> None:
        """Revoke the credentials once the job has ended for good."""
        ...


class NoCredentials:
    """No credentials, for programs that call no server."""

    def issue(self, job: Job) -> Mapping[str, str]:
        return {}

    def is_valid(self, job: Job, token: str) -> bool:
        return True

    def renew(self, job: Job) -> None:
        pass

    def revoke(self, job: Job) -> None:
        pass
