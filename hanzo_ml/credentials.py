"""Who is calling: the IAM's token, under the name that MLflow's client reads too, so that one variable serves both."""

import os

TOKEN = "MLFLOW_TRACKING_TOKEN"


def authorization() -> dict[str, str]:
    """The header that carries the token, read now because it may be renewed; none where there is no token."""
    token = os.environ.get(TOKEN, "").strip()
    return {"Authorization": f"Bearer {token}"} if token else {}
