"""Features of a key, and of rows that nobody prepared (row C5)."""

from api.schemas.mlflow.responses import Message

Features = dict[str, float | None]


class FeaturesOfKey(Message):
    dataset: str
    key: str
    features: Features


class FeaturesOfRows(Message):
    """In the order of the rows."""

    dataset: str
    features: list[Features]
