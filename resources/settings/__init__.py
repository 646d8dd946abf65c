"""Settings: the sections of config.yaml and their environment variables."""

from typing import Any


def __getattr__(name: str) -> Any:
    """`from resources.settings import Settings`, as existing manifests write it, without loading it for others."""
    if name == "Settings":
        from resources.settings.settings import Settings

        return Settings
    raise AttributeError(name)
