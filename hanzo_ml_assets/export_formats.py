"""Under which formats a version has its exports, and which of them is served.

The first has the names of its kinds. Another of the version has its quantization in its names: the registry pointed to it
instead, and of the file in production nobody could prove any more what it was.
"""

from collections.abc import Mapping

from recipes.storage.manifest import Artifact
from resources.metadata.registry.model_versions import ModelVersion


def format_names(version: ModelVersion, made: Mapping[str, Artifact], quantization: str) -> dict[str, Artifact]:
    """What was made, by the names under which a version is to have it: what it has for these bytes, else new ones."""
    there = {format: artifact.digest for format, artifact in version.made_here.items()}

    def name(kind: str, digest: str) -> str:
        quantized = f"{kind}-{quantization.lower()}"
        of_these_bytes = f"{quantized}-{digest[:8]}"  # another release may compute the last bits otherwise
        names = (kind, quantized, of_these_bytes)
        return next(name for name in names if name not in version.artifacts or there.get(name) == digest)

    return {name(kind, artifact.digest): artifact for kind, artifact in made.items()}


def served_export(version: ModelVersion, quantization: str) -> Artifact:
    """The export of a version in a quantization where it has one by that name, else its first. Raises where it has none."""
    return version.made_here.get(f"gguf-{quantization.lower()}") or version.artifact("gguf")
