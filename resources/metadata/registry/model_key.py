"""What a registered model is known by: its name within its organization.

Two organizations may give their models the same name and never learn of each other (row W5). Wherever names of all
organizations share one space, a folder of the object store or the engine's list, the organization goes in front.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote, unquote

from sqlalchemy import ColumnElement, Table, and_

from resources.metadata.tracking.experiments import DEFAULT_ORGANIZATION

MODELS_BUCKET = "hanzo-models"


@dataclass(frozen=True, order=True)
class ModelKey:
    """A registered model: the first two columns of every table of the registry."""

    organization: str
    name: str

    def of(self, table: Table) -> ColumnElement[bool]:
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
    def place(self) -> str:
        """Where the exports of its versions lie."""
        if self.organization == DEFAULT_ORGANIZATION:
            # A leading '@' marks the folder of an organization, and no name may pass for one.
            folder = "%40" + self.name[1:] if self.name.startswith("@") else self.name
            return f"s3://{MODELS_BUCKET}/{folder}"
        return f"s3://{MODELS_BUCKET}/@{quote(self.organization, safe='')}/{self.name}"


def organization_of_place(parts: Sequence[str]) -> str | None:
    """Whose a path in the bucket of models, or below the datasets, is; None for the bucket itself."""
    if not parts:
        return None
    return unquote(parts[0][1:]) if parts[0].startswith("@") else DEFAULT_ORGANIZATION
