"""Run tags that pin a dataset version, and names of asset groups."""

import dagster as dg

from hanzo_ml_assets.control_plane import ControlPlane
from resources.metadata.datasets import DatasetVersion
from resources.metadata.tracking.experiments import DEFAULT_ORGANIZATION

VERSION_TAG = "hanzo_ml/dataset_version"
"""Run tag that pins a dataset version, as NAME@VERSION."""
ORGANIZATION_TAG = "hanzo_ml/organization"
"""Run tag with the dataset's organization: each organization numbers its versions separately."""


def version_tags(version: DatasetVersion) -> dict[str, str]:
    return {VERSION_TAG: version.reference, ORGANIZATION_TAG: version.organization}


def asset_group_name(kind: str, name: str) -> str:
    """Return a Dagster group name, which allows only letters, digits and `_`."""
    return f"{kind}_" + "".join(letter if letter.isalnum() else "_" for letter in name)


def find_pinned_version(context: dg.AssetExecutionContext, control_plane: ControlPlane) -> DatasetVersion | None:
    """Return the version that a sensor pinned, or None: then use the definition's files."""
    tags = context.run.tags
    reference = tags.get(VERSION_TAG)
    return control_plane.datasets.read(reference, tags.get(ORGANIZATION_TAG, DEFAULT_ORGANIZATION)) if reference else None
