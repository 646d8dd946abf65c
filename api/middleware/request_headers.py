"""A header of a request as its scope has it: most requests ask for a handful that are not there."""

from starlette.types import Scope


def header(scope: Scope, wanted: bytes) -> bytes | None:
    """The first header of that name, which is in small letters as the server makes them; None where there is none."""
    for name, value in scope["headers"]:
        if name == wanted:
            return bytes(value)
    return None
