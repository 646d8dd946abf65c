"""What a model version was made of: proved byte for byte, and its training data (rows B8, O11)."""

from typing import Any, Literal

from api.schemas.mlflow.responses import Message


class ProofNode(Message):
    """One thing that was proved, or not: `problems` is empty when every byte is as recorded.

    `seen_above` means that what it was made from is told further up.
    """

    label: str
    uri: str
    digest: str
    files: int
    size_bytes: int
    facts: dict[str, Any]
    problems: list[str]
    made_from: list["ProofNode"]
    seen_above: bool


class Proof(Message):
    """The chain of a version. `broken` names each broken edge as `child -> parent: reason`."""

    name: str
    version: int
    ok: bool
    broken: list[str]
    bytes_hashed: int
    chain: ProofNode


Included = Literal["yes", "none was found", "masked before training", "not examined"]


class PersonalData(Message):
    """Kinds are counted; null means that nobody looked."""

    included: Included
    found: dict[str, int] | None
    masked: dict[str, int] | None


class UsedDataset(Message):
    """`splits` maps what a run used to how many records that had."""

    dataset: str
    id: str
    digest: str
    records: int
    splits: dict[str, int | None]
    transform: Any
    made_of: list[str]
    personal_data: PersonalData


class NamedDataset(Message):
    """What a run's own code named: nothing of it was checked."""

    name: str
    digest: str
    source: str


class TrainingData(Message):
    """`base_models` are what the version began with, whose data nobody here knows."""

    name: str
    version: int
    personal_data: Included
    datasets: list[UsedDataset]
    base_models: list[str]
    logged: list[NamedDataset]
