"""A span of time, as people write it: "20m"."""

import re
from typing import Annotated

from pydantic import AfterValidator

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds_of(duration: str) -> float:
    """`"20m"` -> 1200.0. Raises ValueError on anything but a number and one of s, m, h, d."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]+)?)([smhd])", duration)
    if match is None:
        raise ValueError("not a duration: write a number and s, m, h or d, such as '20m'")
    return float(match[1]) * SECONDS[match[2]]


def no_time(key: str, duration: str) -> str | None:
    """What to say of a key whose span has no seconds. Not in the type, which what is recorded has to fit."""
    if seconds_of(duration):
        return None
    return f"{key} is {duration}, which is no time: give some, such as 20m, or leave it out"


def checked_duration(text: str) -> str:
    """The text as it is, if `seconds_of` can read it."""
    seconds_of(text)
    return text


Duration = Annotated[str, AfterValidator(checked_duration)]
