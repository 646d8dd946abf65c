"""Settings: the sections of config.yaml and their environment variables.

`Settings` is importable from here as well, because existing manifests do so.
"""

from resources.settings.settings import Settings

__all__ = ["Settings"]
