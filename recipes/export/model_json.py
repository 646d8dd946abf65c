"""Read the JSON files of a model folder."""

import json
from pathlib import Path
from typing import Any

from recipes.contracts.job import BadConfiguration


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a model folder."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadConfiguration(f"{path} is missing: give a folder that save_pretrained wrote") from None
    except ValueError as error:
        raise BadConfiguration(f"{path} is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise BadConfiguration(f"{path} is not a JSON object")
    return document
