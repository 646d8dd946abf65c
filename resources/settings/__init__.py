"""Settings: the sections of config.yaml and their environment variables."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Import `Settings` lazily, for manifests that use `from resources.settings import Settings`."""
    if name == "Settings":
        from resources.settings.settings import Settings

        return Settings
    raise AttributeError(name)
