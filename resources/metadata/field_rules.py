"""Validate names, values and numbers (MLflow's limits); tag names that MLflow defines."""

import json
import math
import posixpath
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from recipes.contracts.frozen_model import UNSTORABLE_CHARACTERS
from recipes.storage.manifest import canonical_json
from resources.errors import HanzoError, invalid

# Run tags that MLflow's clients and user interface interpret.

NAME_TAG = "mlflow.runName"
PARENT_TAG = "mlflow.parentRunId"
COMMIT_TAG = "mlflow.source.git.commit"
SOURCE_NAME_TAG = "mlflow.source.name"
SOURCE_TYPE_TAG = "mlflow.source.type"
LOGGED_MODELS_TAG = "mlflow.log-model.history"


# Rules for names, values and numbers before they are stored, with MLflow's limits and messages.
#
# Pure functions without a database. Rules of a single table (such as: a param never changes) are kept with that table.

MAX_KEY = 250
MAX_PARAM_VALUE = 6000
MAX_RUN_TAG_VALUE = 8000
MAX_EXPERIMENT_NAME = 500
MAX_EXPERIMENT_TAG_VALUE = 20_000
MAX_RUN_NAME = 500
MAX_USER = 250
MAX_DATASET_NAME = 500
MAX_DATASET_DIGEST = 36
MAX_INT64 = 2**63 - 1
LARGEST_DOUBLE = 1.7976931348623157e308
RUN_ID_PATTERN = re.compile(r"[a-zA-Z0-9][\w\-]{0,255}", re.ASCII)
KEY_PATTERN = re.compile(r"[/\w.\- :]*")


class MetricPoint(NamedTuple):
    """One value of a metric, as MLflow stores it.

    NaN is stored as 0.0 with `is_nan`, infinity as the largest double. A tuple, because one request may hold a thousand of
    them. `model_id` and the dataset are set if the point also belongs to a logged model.
    """

    key: str
    value: float
    step: int
    timestamp: int
    is_nan: bool = False
    model_id: str = ""
    dataset_name: str = ""
    dataset_digest: str = ""

    @property
    def number(self) -> float:
        return math.nan if self.is_nan else self.value


def metric_point(
    key: str,
    value: float,
    step: int,
    timestamp: int,
    path: str = "",
    model_id: str = "",
    dataset_name: str = "",
    dataset_digest: str = "",
) -> MetricPoint:
    """Return a valid point, or raise an error that names the parameter below `path`."""
    if len(key) > MAX_KEY or not is_key(key):
        check_key(key, "Metric name", join_path(path, "name"))
    if not 0 <= timestamp <= MAX_INT64:
        detail = f"metric '{key}' (value={value}). Timestamp must be a nonnegative long (64-bit integer) "
        raise invalid_value(join_path(path, "timestamp"), timestamp, detail)
    if not -MAX_INT64 - 1 <= step <= MAX_INT64:
        detail = f"metric '{key}' (value={value}). Step must be a valid long (64-bit integer)."
        raise invalid_value(join_path(path, "step"), step, detail)
    if bool(dataset_name) is not bool(dataset_digest):
        raise invalid("Both dataset_name and dataset_digest must be provided if one is provided")
    is_nan = False
    if not math.isfinite(value):
        is_nan = math.isnan(value)
        value = 0.0 if is_nan else math.copysign(LARGEST_DOUBLE, value)
    return MetricPoint(key, value, step, timestamp, is_nan, model_id, dataset_name, dataset_digest)


def check_key(key: str, label: str, path: str) -> None:
    """Check a metric, param or tag key: allowed characters, and a normalized path."""
    if len(key) <= MAX_KEY and is_key(key):
        return
    if not KEY_PATTERN.fullmatch(key):
        rule = "alphanumerics, underscores (_), dashes (-), periods (.), spaces ( ), colon(:) and slashes (/)."
        raise invalid_value(path, key, f"Names may only contain {rule}")
    if not is_canonical_path(key):
        raise invalid_value(
            path,
            key,
            "Names may be treated as files in certain cases, and must not resolve to other names when treated as such. "
            f"This name would resolve to {posixpath.normpath(key)!r}",
        )
    check_length(label, key, MAX_KEY)


@lru_cache(maxsize=4096)
def is_key(key: str) -> bool:
    """Return whether a key is valid; cached, because runs repeat the same keys."""
    return KEY_PATTERN.fullmatch(key) is not None and is_canonical_path(key)


def is_canonical_path(key: str) -> bool:
    normal = posixpath.normpath(key)
    return normal == key and normal != "." and not normal.startswith(("..", "/"))


def checked_param(key: str, value: str, path: str = "") -> tuple[str, str]:
    """Return a valid param; longer values are truncated, as by MLflow's default."""
    check_key(key, "Param key", join_path(path, "key"))
    return key, checked_text(value, join_path(path, "value"))[:MAX_PARAM_VALUE]


def checked_run_tag(key: str, value: str, path: str = "") -> tuple[str, str]:
    """Return a valid run tag; longer values are truncated, as by MLflow's default."""
    check_key(key, join_path(path, "key"), join_path(path, "key"))
    return key, checked_text(value, join_path(path, "value"))[:MAX_RUN_TAG_VALUE]


def checked_creation_tag(key: str, value: str, path: str = "") -> tuple[str, str]:
    """Return a valid tag of a new run.

    MLflow does not validate keys here, so existing clients send arbitrary ones.
    """
    check_length(join_path(path, "key"), checked_text(key, join_path(path, "key")), MAX_KEY)
    return key, checked_text(value, join_path(path, "value"))[:MAX_RUN_TAG_VALUE]


def checked_experiment_tag(key: str, value: str) -> tuple[str, str]:
    check_key(key, "key", "key")
    check_length("value", value, MAX_EXPERIMENT_TAG_VALUE)
    return key, checked_text(value, "value")


def checked_experiment_name(name: str) -> str:
    if not name:
        raise invalid(f"Invalid experiment name: '{name}'")
    check_length("name", name, MAX_EXPERIMENT_NAME)
    return checked_text(name, "name")


def checked_run_id(run_id: str) -> str:
    if not RUN_ID_PATTERN.fullmatch(run_id):
        rule = "it must begin with a letter or a digit, and hold up to 256 letters, digits, underscores (_) and dashes (-)"
        raise invalid_value("run_id", run_id, rule)
    return run_id


def checked_text(text: str, path: str) -> str:
    """Return text that every database can store.

    PostgreSQL accepts neither NUL nor lone surrogates.
    """
    if UNSTORABLE_CHARACTERS.search(text):
        raise invalid(f"Invalid value for parameter '{path}' supplied: it holds a character that cannot be stored")
    return text


def refuse_unstorable(value: Any, path: str) -> None:
    """Apply `checked_text` to every string and key of a JSON value.

    A single bad one makes PostgreSQL unable to read any field of the row.
    """
    if isinstance(value, str):
        checked_text(value, path)
    elif isinstance(value, dict):
        for key, member in value.items():
            checked_text(key, path)
            refuse_unstorable(member, path)
    elif isinstance(value, list | tuple):
        for member in value:
            refuse_unstorable(member, path)


def checked_time(value: int | None, path: str) -> int | None:
    if value is not None and not -MAX_INT64 - 1 <= value <= MAX_INT64:
        raise invalid_value(path, value, "It must be a 64-bit integer (milliseconds since 1970)")
    return value


def check_length(label: str, value: str, limit: int) -> None:
    if len(value) > limit:
        raise invalid(f"'{label}' exceeds the maximum length of {limit} characters")


def printable(text: str) -> str:
    """Return user input shortened and on one line."""
    return text[:100].encode("unicode_escape").decode("ascii")


def join_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def invalid_value(path: str, value: Any, detail: str) -> HanzoError:
    shown = json.dumps(value if not isinstance(value, str) else value[:MAX_KEY])
    return invalid(f"Invalid value {shown} for parameter '{path}' supplied: {detail}")


# Rules for names, tags and metadata of dataset versions. Pure functions without a database.

DATASET_NAME_PATTERN = re.compile(r"[A-Za-z0-9][\w.-]{0,249}")
VERSION_PATTERN = re.compile(r"[0-9]{1,9}")


def checked_dataset_name(name: str) -> str:
    """Return a name that is valid in an object store path."""
    if not DATASET_NAME_PATTERN.fullmatch(name) or ".." in name:
        raise invalid(
            f"dataset name {name!r} is not allowed: use letters, digits, '_', '-' and '.', and start with a letter or digit"
        )
    return name


def parse_dataset_reference(reference: str) -> tuple[str, int | None]:
    """Parse `NAME` or `NAME@VERSION` into name and number. Raises 400 on anything else."""
    name, at, number = reference.partition("@")
    if not name or (at and not VERSION_PATTERN.fullmatch(number)):
        raise invalid(f"'{reference}' is not a dataset reference: write NAME or NAME@VERSION, such as {name or 'my-data'}@1")
    return name, int(number) if at else None


def checked_dataset_tags(tags: Sequence[str]) -> list[str]:
    """Return tags that every database can search. Raises 400."""
    if bad := [tag for tag in tags if not tag.strip() or UNSTORABLE_CHARACTERS.search(tag)]:
        raise invalid(f"tag {bad[0][:100]!r} is not allowed: write text without control characters")
    return list(tags)


def checked_dataset_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata that can be serialized as JSON.

    A single unserializable value would make every list of versions fail.
    """
    try:
        canonical_json(metadata)
    except (ValueError, RecursionError):
        raise invalid(
            "metadata has a value that JSON cannot represent, such as NaN, or is nested too deeply: use null or text"
        ) from None
    refuse_unstorable(metadata, "metadata")
    return dict(metadata)
