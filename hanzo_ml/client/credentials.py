"""The authorization header, from MLFLOW_TRACKING_TOKEN."""

import os

TOKEN_VARIABLE = "MLFLOW_TRACKING_TOKEN"


class InvalidToken(ValueError):
    """What stands for the token can be none."""


def authorization_header() -> dict[str, str]:
    """The header that carries the token, read now because it may be renewed; none where there is no token.

    Raises:
        BadToken: what stands for it can be none.
    """
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if not (token.isascii() and token.isprintable()):
        raise InvalidToken(f"{TOKEN_VARIABLE} holds a character that no token has: copy it again, in one line")
    return {"Authorization": f"Bearer {token}"} if token else {}
