"""Names and keys of models, and the rules for aliases, tags and versions."""

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from sqlalchemy import ColumnElement, Table, and_

from recipes.storage import uris
from resources.errors import HanzoError, already_exists, invalid, not_found
from resources.metadata.field_rules import check_key, check_length, checked_text, invalid_value, printable
from resources.metadata.tracking.experiments import DEFAULT_ORGANIZATION

# A registered model is identified by its name within its organization.
#
# Two organizations may use the same model name without learning of each other. Where names of all organizations share one
# namespace (a folder of the object store, the engine's list), the organization is the prefix.


@dataclass(frozen=True, order=True)
class ModelKey:
    """Identifies a registered model: the first two columns of every table of the registry."""

    organization: str
    name: str

    def row_filter(self, table: Table) -> ColumnElement[bool]:
        """Return the condition that a registry row belongs to this model."""
        return and_(table.c.organization == self.organization, table.c.name == self.name)

    @property
    def row(self) -> dict[str, str]:
        return {"organization": self.organization, "name": self.name}

    @property
    def served_name(self) -> str:
        """The name that the engine's clients use; unique, because model names hold no '/'."""
        if self.organization == DEFAULT_ORGANIZATION:
            return self.name
        return f"{quote(self.organization, safe='')}/{self.name}"

    @property
    def folder_uri(self) -> str:
        """The location of its versions' exports."""
        return uris.model_folder(self.name, None if self.organization == DEFAULT_ORGANIZATION else self.organization)


def folder_organization(parts: Sequence[str]) -> str | None:
    """Return the owner of a path below models or datasets; None for the root."""
    if not parts:
        return None
    owner = uris.parse_organization(parts[0])
    return DEFAULT_ORGANIZATION if owner is None else owner


# Rules for names of models, aliases, tags and version numbers: MLflow's rules, limits and messages.
#
# Pure functions without a database. Rules for the locations of a version's files are in `model_version_sources`.

PROMPT_TAG = "mlflow.prompt.is_prompt"
"""MLflow keeps prompts as models with this tag."""
PROMPT_TEXT_TAG = "mlflow.prompt.text"
MAX_MODEL_NAME = 250
MAX_TAG_VALUE = 100_000
MAX_ALIAS = 255
MAX_DESCRIPTION = 5000
MAX_VERSION = 2**31 - 1
ALIAS_PATTERN = re.compile(r"[\w\-]*")
VERSION_ALIAS_PATTERN = re.compile(r"[vV]\d+")
LATEST_ALIAS = "latest"
"""A reserved alias, which always refers to the newest version."""
LABEL_TAG = "hanzo.version"
"""A version number chosen by the caller, such as "3.1": ours are consecutive."""
STAGE_TAG = "hanzo.stage"
TRAFFIC_TAG = "hanzo.traffic_percent"
OWN_TAGS = (LABEL_TAG, STAGE_TAG, TRAFFIC_TAG)
"""Tags with a version's label and stage: versions are found and promoted by them, so clients cannot set them."""


def checked_model_name(name: str, path: str = "name") -> str:
    if not name.strip():
        raise invalid(f"Missing value for required parameter '{path}'.")
    if "/" in name or ":" in name:
        raise invalid(f"Invalid model name '{printable(name)}'. Names cannot contain '/' or ':'.")
    normal = posixpath.normpath(name)
    if normal != name or normal == "." or normal.startswith(".."):
        raise invalid_value(
            path,
            name,
            "Names may be treated as files in certain cases, and must not resolve to other names when treated as such. "
            f"This name would resolve to {normal!r}",
        )
    check_length(path, name, MAX_MODEL_NAME)
    return checked_text(name, path)


def checked_tag(key: str, value: str) -> tuple[str, str]:
    """Return a model's or version's valid tag; unlike a run's, it is never truncated."""
    check_key(key, "key", "key")
    if key == PROMPT_TEXT_TAG and len(value) > MAX_TAG_VALUE:  # MLflow's message, which callers match
        raise invalid(f"Prompt text exceeds max length of {MAX_TAG_VALUE} characters.")
    check_length("value", value, MAX_TAG_VALUE)
    return key, checked_text(value, "value")


def checked_version_tag_key(key: str) -> str:
    """Return the key of a version tag that a client may set or delete."""
    check_key(key, "key", "key")
    if key in OWN_TAGS:
        raise invalid(f"The tag '{key}' is reserved: it is set when a version is registered or moved to a stage")
    return key


def checked_version_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """Return the tags of a new version without reserved ones.

    MLflow copies a version with all of its tags, but the reserved ones belong to the original.
    """
    return dict(checked_tag(key, value) for key, value in tags.items() if key not in OWN_TAGS)


def checked_description(text: str) -> str:
    check_length("description", text, MAX_DESCRIPTION)
    return checked_text(text, "description")


def checked_alias(alias: str) -> str:
    """Return an alias that may be looked up."""
    if not alias:
        raise invalid("Registered model alias name cannot be empty.")
    if not ALIAS_PATTERN.fullmatch(alias):
        rule = "Names may only contain alphanumerics, underscores (_), and dashes (-)."
        raise invalid(f"Invalid alias name: '{printable(alias)}'. {rule}")
    check_length("Registered model alias name", alias, MAX_ALIAS)
    return alias


def checked_new_alias(alias: str) -> str:
    """Return an alias that may be set: not a reserved one."""
    checked_alias(alias)
    if alias.lower() == LATEST_ALIAS:
        raise invalid("'latest' alias name (case insensitive) is reserved.")
    if VERSION_ALIAS_PATTERN.fullmatch(alias):
        raise invalid(f"Version alias name '{alias}' is reserved.")
    return alias


def version_number(text: str) -> int:
    """Parse a version number: MLflow's versions are strings, the database's are numbers."""
    if not re.fullmatch(r"[+-]?\d{1,19}", text.strip(), re.ASCII):
        raise invalid(f"Parameter 'version' must be an integer, got '{printable(text)}'.")
    return int(text)


def is_prompt(tags: Mapping[str, str]) -> bool:
    return tags.get(PROMPT_TAG, "").lower() == "true"


def name_conflict_error(name: str, *, old: Mapping[str, str], new: Mapping[str, str]) -> HanzoError:
    """Return MLflow's error for a used name; `old` and `new` are both models' tags."""
    kind, existing_kind = ("Prompt" if is_prompt(tags) else "Registered Model" for tags in (new, old))
    if kind == existing_kind:
        return already_exists(f"{kind} (name={printable(name)}) already exists.")
    return already_exists(
        f"Tried to create a {kind.lower()} with name '{printable(name)}', but the name is already taken by a "
        f"{existing_kind.lower()}. MLflow does not allow creating a model and a prompt with the same name."
    )


def model_not_found(name: str) -> HanzoError:
    """Return MLflow's error, whose words its clients match, with our advice appended."""
    shown = printable(name)
    return not_found(f"Registered Model with name={shown} not found: there is no model '{shown}', see `hanzo-ml model list`")


def version_not_found(name: str, number: int) -> HanzoError:
    """Return MLflow's error, as `model_not_found`."""
    shown = printable(name)
    return not_found(
        f"Model Version (name={shown}, version={number}) not found: '{shown}' has no version {number}, "
        "see `hanzo-ml model list`"
    )
