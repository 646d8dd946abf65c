"""Parse durations and memory sizes, and format counts."""

import re
from typing import Annotated

from pydantic import AfterValidator


def pluralize(number: int, thing: str) -> str:
    """Format a count with its noun: `1 file`, `1,200 files`, `2 processes`."""
    many = "es" if thing.endswith("s") else "s"
    return f"{number:,} {thing}{'' if number == 1 else many}"


BYTES_PER_UNIT = {"": 1, "k": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4, "P": 1000**5}
BYTES_PER_UNIT |= {"Ki": 1024, "Mi": 1024**2, "Gi": 1024**3, "Ti": 1024**4, "Pi": 1024**5}


def parse_bytes(text: str) -> float:
    """Parse a memory size: `"64Gi"` -> 68719476736.0. Raises ValueError."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]+)?)(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P|)", text)
    if match is None:
        raise ValueError(f"memory '{text}' is not a quantity: write a number and a unit, such as 512Gi")
    return float(match[1]) * BYTES_PER_UNIT[match[2]]


def validate_quantity(text: str) -> str:
    """Return the text if `parse_bytes` accepts it."""
    parse_bytes(text)
    return text


SECONDS_PER_UNIT = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_duration(duration: str) -> float:
    """Parse a duration, a number with s, m, h or d: `"20m"` -> 1200.0.

    Raises ValueError.
    """
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]+)?)([smhd])", duration)
    if match is None:
        raise ValueError("not a duration: write a number and s, m, h or d, such as '20m'")
    return float(match[1]) * SECONDS_PER_UNIT[match[2]]


def explain_zero_duration(key: str, duration: str) -> str | None:
    """Return the error for a duration of zero, or None.

    Not checked by the type, which recorded documents must satisfy.
    """
    if parse_duration(duration):
        return None
    return f"{key} is {duration}, but must be positive: set a duration such as 20m, or remove the key"


def validate_duration(text: str) -> str:
    """Return the text if `parse_duration` accepts it."""
    parse_duration(text)
    return text


Duration = Annotated[str, AfterValidator(validate_duration)]
