"""What stands in the object store, as answers name it."""

from api.schemas.mlflow.responses import Message


class Artifact(Message):
    """A folder of the store; `digest` is the SHA-256 of its manifest."""

    kind: str
    uri: str
    digest: str
    size_bytes: int


class Deleted(Message):
    """`deleted` is what it was called."""

    deleted: str
