"""What the files of a logged artifact say of the model that is in them (row O1): its weights and its architecture.

Pure functions of names, sizes and bytes. Whoever logged them wrote them: what cannot be read is left out, and nothing of it
is proof of anything.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import yaml

from recipes.yaml_document import yaml_document

FORMAT = "safetensors"
"""The specification's word for weights that training left. None of the formats that are proved, exported or served."""
CONFIG = "config.json"
MLFLOW, MLMODEL = "mlflow", "MLmodel"
"""The format of what MLflow's clients log as a model, a folder, and the file in it that describes it."""
MAX_FLAVORS = 20
MAX_CONFIG_BYTES = 1 << 20
MAX_ARCHITECTURE = 250


@dataclass(frozen=True)
class Weights:
    """The places of a model's files: of its weights, in the order of their names, and of what describes them."""

    files: tuple[str, ...]
    config: str | None

    @property
    def place(self) -> str:
        """The one file, or the folder of several with a slash behind it."""
        return self.files[0] if len(self.files) == 1 else self.files[0].rpartition("/")[0] + "/"


def weights_in(artifact: str, places: Sequence[str]) -> Weights:
    """The weights of an artifact: in its topmost folder that has any, for what lies deeper is a part or a copy of them.

    Args:
        artifact: where it lies, a file or a folder.
        places: its files.
    """
    found = [place for place in places if place.endswith(f".{FORMAT}")]
    folder = min((place.rpartition("/")[0] for place in found), key=lambda name: (name.count("/"), name), default=artifact)
    config = f"{folder}/{CONFIG}"
    files = sorted(place for place in found if place.rpartition("/")[0] == folder)
    return Weights(tuple(files), config if config in places else None)


def architecture_in(config: bytes) -> str:
    """The first of the architectures that a config.json names; empty where it is none or names none."""
    try:
        known = json.loads(config)
    except (ValueError, RecursionError):
        return ""
    named = known.get("architectures") if isinstance(known, dict) else None
    first = named[0] if isinstance(named, list) and named else None
    return first if isinstance(first, str) and first.isprintable() and len(first) <= MAX_ARCHITECTURE else ""


def flavors_in(mlmodel: bytes) -> tuple[str, ...]:
    """The ways in which MLflow can load a model, as its MLmodel names them; none where it is none."""
    try:
        known = yaml_document(mlmodel.decode())
    except (yaml.YAMLError, ValueError, RecursionError):
        return ()
    named = known.get("flavors") if isinstance(known, dict) else None
    if not isinstance(named, dict):
        return ()
    plain = [name for name in named if isinstance(name, str) and name.isprintable() and len(name) <= MAX_ARCHITECTURE]
    return tuple(sorted(plain)[:MAX_FLAVORS])


def checksum_of(hashes: Mapping[str, str]) -> str:
    """Of one file its SHA-256; of several that of their list, as `sha256sum *.safetensors | sha256sum` has it.

    Args:
        hashes: by the files' names, in their folder.
    """
    if len(hashes) == 1:
        return f"sha256:{next(iter(hashes.values()))}"
    lines = (f"{sha256}  {name}\n" for name, sha256 in sorted(hashes.items()))
    return f"sha256:{hashlib.sha256(''.join(lines).encode()).hexdigest()}"
