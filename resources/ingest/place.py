"""Where the versions of a dataset lie (row B2)."""

from recipes.storage import uris
from resources.metadata.tracking.experiments import DEFAULT_ORGANIZATION


def dataset_folder(organization: str, name: str) -> str:
    """The folder of a dataset's versions. No dataset's name begins with '@', so that no organization's folder is one's."""
    return uris.dataset_folder(name, None if organization == DEFAULT_ORGANIZATION else organization)
