"""What a registered model is known by: its name within its organization.

Two organizations may give their models the same name and never learn of each other (row W5). Wherever names of all
organizations share one space, a folder of the object store or the engine's list, the organization goes in front.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from sqlalchemy import ColumnElement, Table, and_

from recipes.storage import uris
from resources.metadata.tracking.experiments import DEFAULT_ORGANIZATION


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
    owner = uris.organization_of(parts[0])
    return DEFAULT_ORGANIZATION if owner is None else owner
