"""Describe a model from its run's parameters and its logged files."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import yaml

from recipes.contracts.yaml_reader import load_yaml
from recipes.planning.hardware_fit import METHODS_BY_MEMORY
from resources.metadata.tracking.logged_runs import LoggedRun

# What a run says about its model: its params and its measurements. Pure functions.

CONFIG_PARAMS = ("dataset", "method", "recipe")
STEPS_METRIC = "system/total_steps"
TOKENS_METRIC = "system/total_tokens_processed"
NUMERIC_PARAMS = {"dataset_version": int, "learning_rate": float, "lora_rank": int, "max_steps": int, "total_steps": int}
SYSTEM_PREFIX = "system/"
"""Prefix of metrics that describe what a run used, not its model."""


@dataclass(frozen=True)
class RunFacts:
    """What a run logged about its model.

    What it did not log is left out, or empty.
    """

    base_model: str
    method: str
    metrics: Mapping[str, float]
    training_config: Mapping[str, object]


def read_run_facts(logged: LoggedRun, gpu_hours: float | None) -> RunFacts:
    """Read the facts from what a run logged. `gpu_hours` are metered by the control plane.

    None if it used no GPU.
    """
    params = logged.params
    measured = {point.key: point.value for point in logged.metrics if not point.is_nan}
    config: dict[str, object] = {key: params[key] for key in CONFIG_PARAMS if key in params}
    config |= {key: parse_number(convert, params[key]) for key, convert in NUMERIC_PARAMS.items() if key in params}
    if "max_steps" in config:
        config = {"total_steps": config.pop("max_steps"), **config}
    if STEPS_METRIC in measured:  # training may end before its last planned step
        config["total_steps"] = int(measured[STEPS_METRIC])
    if gpu_hours is not None:
        config["gpu_hours"] = gpu_hours
    return RunFacts(
        base_model=params.get("base_model") or params.get("model", ""),
        method=method if (method := params.get("method", "")) in METHODS_BY_MEMORY else "",
        metrics={key: value for key, value in measured.items() if not key.startswith(SYSTEM_PREFIX)},
        training_config=config,
    )


def parse_number(convert: Callable[[str], float], value: str) -> float | str:
    """Convert a number, or return the text.

    A script's run may call its dataset version "v7". JSON has no NaN and no infinity: they stay text.
    """
    try:
        number = convert(value)
    except ValueError:
        return value
    return value if isinstance(number, float) and not math.isfinite(number) else number


# What the files of a logged artifact say about the model in it: its weights and its architecture.
#
# Pure functions of names, sizes and bytes. The files come from users: what cannot be read is left out, and nothing is
# trusted as proof.

WEIGHTS_FORMAT = "safetensors"
"""The specification's name for weights from training. It is not one of the formats that are verified, exported or served."""
CONFIG_FILE = "config.json"
MLFLOW_FORMAT, MLMODEL_FILE = "mlflow", "MLmodel"
"""The format of a model folder that MLflow's clients log, and the file in it that describes the model."""
MAX_FLAVORS = 20
MAX_CONFIG_BYTES = 1 << 20
MAX_NAME_CHARACTERS = 250


@dataclass(frozen=True)
class WeightFiles:
    """The URIs of a model's files: its weights, ordered by name, and its configuration."""

    files: tuple[str, ...]
    config: str | None

    @property
    def location(self) -> str:
        """The URI of the only file, or of the files' folder with a trailing slash."""
        return self.files[0] if len(self.files) == 1 else self.files[0].rpartition("/")[0] + "/"


def find_weights(artifact: str, places: Sequence[str]) -> WeightFiles:
    """Return the weights of an artifact.

    Those in its topmost folder with any, since deeper ones are parts or copies.

    Args:
        artifact: the URI of a file or a folder.
        places: the URIs of its files.
    """
    found = [location for location in places if location.endswith(f".{WEIGHTS_FORMAT}")]
    folder = min(
        (location.rpartition("/")[0] for location in found), key=lambda name: (name.count("/"), name), default=artifact
    )
    config = f"{folder}/{CONFIG_FILE}"
    files = sorted(location for location in found if location.rpartition("/")[0] == folder)
    return WeightFiles(tuple(files), config if config in places else None)


def read_architecture(config: bytes) -> str:
    """Return the first architecture that a config.json names.

    Empty if it cannot be read or names none.
    """
    try:
        known = json.loads(config)
    except (ValueError, RecursionError):
        return ""
    named = known.get("architectures") if isinstance(known, dict) else None
    first = named[0] if isinstance(named, list) and named else None
    return first if isinstance(first, str) and first.isprintable() and len(first) <= MAX_NAME_CHARACTERS else ""


def read_flavors(mlmodel: bytes) -> tuple[str, ...]:
    """Return the ways in which MLflow can load a model, from its MLmodel file.

    Empty if it cannot be read.
    """
    try:
        known = load_yaml(mlmodel.decode())
    except (yaml.YAMLError, ValueError, RecursionError):
        return ()
    named = known.get("flavors") if isinstance(known, dict) else None
    if not isinstance(named, dict):
        return ()
    plain = [name for name in named if isinstance(name, str) and name.isprintable() and len(name) <= MAX_NAME_CHARACTERS]
    return tuple(sorted(plain)[:MAX_FLAVORS])


def combined_checksum(hashes: Mapping[str, str]) -> str:
    """Return a file's SHA-256, or for several files that of their list.

    The list's is the one that `sha256sum *.safetensors | sha256sum` prints.

    Args:
        hashes: by the files' names in their folder.
    """
    if len(hashes) == 1:
        return f"sha256:{next(iter(hashes.values()))}"
    lines = (f"{sha256}  {name}\n" for name, sha256 in sorted(hashes.items()))
    return f"sha256:{hashlib.sha256(''.join(lines).encode()).hexdigest()}"
