"""What a job would need (rows D2, L8, Z26). Sizes in bytes; null where too little is known."""

from typing import Literal

from api.schemas.mlflow.responses import Message


class TokenCount(Message):
    """Tokens in all records of a version; `source` says how that is known."""

    count: int
    records: int
    source: str


class MemoryParts(Message):
    weights: float
    adapter: float
    gradients: float
    optimizer: float
    activations: float
    working: float
    gathered: float
    allowance: float


class NeededMemory(Message):
    """On one GPU or of the host, as `where` says; `available` is null where nothing is known of the hardware."""

    needed: float
    available: float | None
    where: str
    parts: MemoryParts


class Bounds(Message):
    low: float
    likely: float
    high: float


class MeasuredRun(Message):
    run_id: str
    tokens_per_second: float


class SeedEstimate(Message):
    """What the recipe's file says; empty where it says nothing."""

    time: str
    cost: str


class JobEstimate(Message):
    """`source` says what the hours stand on, `notes` what is not known or assumed. `tokens` of pairs are as many as those of
    the dataset have; `tokens_per_step` is the most that a step may have. `disk` says how many checkpoints it must hold."""

    recipe: str
    method: Literal["full", "lora", "qlora"]
    objective: str
    base_model: str
    hardware: str
    gpus: int
    steps: int
    tokens: int
    tokens_per_step: int
    dataset: TokenCount | None
    epochs: float | None
    trained_parameters: int | None
    tokens_per_parameter: float | None
    compute_optimal_tokens_per_parameter: float
    memory: NeededMemory | None
    checkpoint_bytes: int | None
    disk: str | None
    hours: Bounds | None
    dollars: Bounds | None
    source: str
    past_runs: list[MeasuredRun]
    seed_estimate: SeedEstimate
    notes: list[str]
