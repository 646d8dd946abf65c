"""Who is calling: the IAM's token, under the name that MLflow's client reads too, so that one variable serves both."""

import os

TOKEN = "MLFLOW_TRACKING_TOKEN"


class BadToken(ValueError):
    """What stands for the token can be none."""


def authorization() -> dict[str, str]:
    """The header that carries the token, read now because it may be renewed; none where there is no token.

    Raises:
        BadToken: what stands for it can be none.
    """
    token = os.environ.get(TOKEN, "").strip()
    if not (token.isascii() and token.isprintable()):
        raise BadToken(f"{TOKEN} holds a character that no token has: copy it again, in one line")
    return {"Authorization": f"Bearer {token}"} if token else {}
