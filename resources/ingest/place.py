"""Where the versions of a dataset lie (row B2)."""

from urllib.parse import quote

from resources.metadata.tracking.experiments import DEFAULT_ORGANIZATION


def place_of(organization: str, name: str) -> str:
    """The folder of a dataset's versions. No dataset's name begins with '@', so that no organization's folder is one's."""
    folder = "" if organization == DEFAULT_ORGANIZATION else f"@{quote(organization, safe='')}/"
    return f"s3://hanzo-ml/datasets/{folder}{name}"
