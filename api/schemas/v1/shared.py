"""Types that several responses of /v1 have."""

from typing import Literal

from typing_extensions import TypedDict

Status = Literal["queued", "running", "completed", "failed", "cancelled"]


class Deleted(TypedDict):
    """`deleted` is what it was called."""

    deleted: str
