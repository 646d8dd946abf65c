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

# What a registered model is known by: its name within its organization.
#
# Two organizations may give their models the same name and never learn of each other (row W5). Wherever names of all
# organizations share one space, a folder of the object store or the engine's list, the organization goes in front.


@dataclass(frozen=True, order=True)
class ModelKey:
    """A registered model: the first two columns of every table of the registry."""

    organization: str
    name: str

    def row_filter(self, table: Table) -> ColumnElement[bool]:
        """The condition that a row of the registry is this model's."""
        return and_(table.c.organization == self.organization, table.c.name == self.name)

    @property
    def row(self) -> dict[str, str]:
        return {"organization": self.organization, "name": self.name}

    @property
    def served_name(self) -> str:
        """What the engine's clients call it: no model's name holds a '/', so no other model is called the same."""
        if self.organization == DEFAULT_ORGANIZATION:
            return self.name
        return f"{quote(self.organization, safe='')}/{self.name}"

    @property
    def folder_uri(self) -> str:
        """Where the exports of its versions lie."""
        return uris.model_folder(self.name, None if self.organization == DEFAULT_ORGANIZATION else self.organization)


def folder_organization(parts: Sequence[str]) -> str | None:
    """Whose a path in the bucket of models, or below the datasets, is; None for the bucket itself."""
    if not parts:
        return None
    owner = uris.parse_organization(parts[0])
    return DEFAULT_ORGANIZATION if owner is None else owner


# What a model's name, an alias, a tag or a version's number must look like: MLflow's rules, limits and messages (row F9).
#
# Pure functions without a database. Where a version's files may lie is `model_version_sources`.

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
"""An alias that nobody sets: it always names the newest version."""
LABEL_TAG = "hanzo.version"
"""A version number of the caller's own, such as "3.1": ours are counted."""
STAGE_TAG = "hanzo.stage"
TRAFFIC_TAG = "hanzo.traffic_percent"
OWN_TAGS = (LABEL_TAG, STAGE_TAG, TRAFFIC_TAG)
"""What a version is called and where it stands: by these it is found and promoted, so that nobody sets them as he likes."""


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
    """The tag of a model or a version. Unlike a run's, a longer value is refused."""
    check_key(key, "key", "key")
    if key == PROMPT_TEXT_TAG and len(value) > MAX_TAG_VALUE:  # in MLflow's own words, which its client's callers look for
        raise invalid(f"Prompt text exceeds max length of {MAX_TAG_VALUE} characters.")
    check_length("value", value, MAX_TAG_VALUE)
    return key, checked_text(value, "value")


def checked_version_tag_key(key: str) -> str:
    """The key of a version's tag that a client may set or delete."""
    check_key(key, "key", "key")
    if key in OWN_TAGS:
        raise invalid(f"The tag '{key}' is the registry's own: it is given as a version is registered or moved to a stage")
    return key


def checked_version_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """The tags of a new version. MLflow copies a version with all of its tags: the registry's own stay with the original."""
    return dict(checked_tag(key, value) for key, value in tags.items() if key not in OWN_TAGS)


def checked_description(text: str) -> str:
    check_length("description", text, MAX_DESCRIPTION)
    return checked_text(text, "description")


def checked_alias(alias: str) -> str:
    """An alias that can be asked for."""
    if not alias:
        raise invalid("Registered model alias name cannot be empty.")
    if not ALIAS_PATTERN.fullmatch(alias):
        rule = "Names may only contain alphanumerics, underscores (_), and dashes (-)."
        raise invalid(f"Invalid alias name: '{printable(alias)}'. {rule}")
    check_length("Registered model alias name", alias, MAX_ALIAS)
    return alias


def checked_new_alias(alias: str) -> str:
    """An alias that may be set: not one that already means something."""
    checked_alias(alias)
    if alias.lower() == LATEST_ALIAS:
        raise invalid("'latest' alias name (case insensitive) is reserved.")
    if VERSION_ALIAS_PATTERN.fullmatch(alias):
        raise invalid(f"Version alias name '{alias}' is reserved.")
    return alias


def version_number(text: str) -> int:
    """MLflow's versions are strings; those of a database are numbers."""
    if not re.fullmatch(r"[+-]?\d{1,19}", text.strip(), re.ASCII):
        raise invalid(f"Parameter 'version' must be an integer, got '{printable(text)}'.")
    return int(text)


def is_prompt(tags: Mapping[str, str]) -> bool:
    return tags.get(PROMPT_TAG, "").lower() == "true"


def name_conflict_error(name: str, *, old: Mapping[str, str], new: Mapping[str, str]) -> HanzoError:
    """MLflow's words where a model or a prompt has the name already. `old` and `new` are their tags."""
    kind, existing_kind = ("Prompt" if is_prompt(tags) else "Registered Model" for tags in (new, old))
    if kind == existing_kind:
        return already_exists(f"{kind} (name={printable(name)}) already exists.")
    return already_exists(
        f"Tried to create a {kind.lower()} with name '{printable(name)}', but the name is already taken by a "
        f"{existing_kind.lower()}. MLflow does not allow creating a model and a prompt with the same name."
    )


def model_not_found(name: str) -> HanzoError:
    """MLflow's words, which its clients and their tests look for, then ours, which say what to do."""
    shown = printable(name)
    return not_found(f"Registered Model with name={shown} not found: there is no model '{shown}', see `hanzo-ml model list`")


def version_not_found(name: str, number: int) -> HanzoError:
    """As `model_not_found`."""
    shown = printable(name)
    return not_found(
        f"Model Version (name={shown}, version={number}) not found: '{shown}' has no version {number}, "
        "see `hanzo-ml model list`"
    )
