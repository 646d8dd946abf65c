"""Parse durations and memory sizes, and write counts, as people do."""

import re
from typing import Annotated

from pydantic import AfterValidator


def pluralize(number: int, thing: str) -> str:
    """`1 file`, `1,200 files`, `2 processes`: of a thing whose plural ends with an s."""
    many = "es" if thing.endswith("s") else "s"
    return f"{number:,} {thing}{'' if number == 1 else many}"


BYTES_PER_UNIT = {"": 1, "k": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4, "P": 1000**5}
BYTES_PER_UNIT |= {"Ki": 1024, "Mi": 1024**2, "Gi": 1024**3, "Ti": 1024**4, "Pi": 1024**5}


def parse_bytes(text: str) -> float:
    """`"64Gi"` -> 68719476736.0. Raises ValueError on what is no quantity."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]+)?)(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P|)", text)
    if match is None:
        raise ValueError(f"memory '{text}' is no quantity: write a number and Gi, such as 512Gi")
    return float(match[1]) * BYTES_PER_UNIT[match[2]]


def validate_quantity(text: str) -> str:
    """The text as it is, if `parse_bytes` can read it."""
    parse_bytes(text)
    return text


SECONDS_PER_UNIT = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_duration(duration: str) -> float:
    """`"20m"` -> 1200.0. Raises ValueError on anything but a number and one of s, m, h, d."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]+)?)([smhd])", duration)
    if match is None:
        raise ValueError("not a duration: write a number and s, m, h or d, such as '20m'")
    return float(match[1]) * SECONDS_PER_UNIT[match[2]]


def explain_zero_duration(key: str, duration: str) -> str | None:
    """What to say of a key whose span has no seconds. Not in the type, which what is recorded has to fit."""
    if parse_duration(duration):
        return None
    return f"{key} is {duration}, which is no time: give some, such as 20m, or leave it out"


def validate_duration(text: str) -> str:
    """The text as it is, if `parse_duration` can read it."""
    parse_duration(text)
    return text


Duration = Annotated[str, AfterValidator(validate_duration)]
