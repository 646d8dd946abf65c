"""Read the JSON files of a model folder."""

import json
from pathlib import Path
from typing import Any

from recipes.contracts.job import BadConfiguration


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a model folder. Raises BadConfiguration."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadConfiguration(f"{path} is missing: use a folder written by save_pretrained") from None
    except ValueError as error:
        raise BadConfiguration(f"{path} is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise BadConfiguration(f"{path} is not a JSON object")
    return document
