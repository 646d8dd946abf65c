"""Kept until its last importer is moved to `resources.errors`."""

from resources.errors import EngineError

__all__ = ["EngineError"]
