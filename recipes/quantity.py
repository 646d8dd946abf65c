"""An amount of memory, as Kubernetes writes it."""

import re

UNITS = {"": 1, "k": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4, "P": 1000**5}
UNITS |= {"Ki": 1024, "Mi": 1024**2, "Gi": 1024**3, "Ti": 1024**4, "Pi": 1024**5}


def bytes_of(text: str) -> float:
    """`"64Gi"` -> 68719476736.0. Raises ValueError on what is no quantity."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]+)?)(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P|)", text)
    if match is None:
        raise ValueError(f"memory '{text}' is no quantity: write a number and Gi, such as 512Gi")
    return float(match[1]) * UNITS[match[2]]


def checked_quantity(text: str) -> str:
    """The text as it is, if `bytes_of` can read it."""
    bytes_of(text)
    return text
