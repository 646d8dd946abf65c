"""Storage URIs: their form is a stored contract, built by a single module."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.storage import uris

ROOT = Path(uris.__file__).parents[2]
PRODUCT_FOLDERS = ("recipes", "resources", "hanzo_ml_assets", "sensors", "api", "hanzo_ml")
SHA256 = "0123456789abcdef" * 4


@pytest.mark.requirement("N6")
def test_uris_have_their_stored_form() -> None:
    assert uris.run_record("r1") == "s3://hanzo-ml/runs/r1/record"
    assert uris.run_result("r1", "train") == "s3://hanzo-ml/runs/r1/train.json"
    assert uris.run_artifacts("r1") == "s3://hanzo-ml/runs/r1/artifacts"
    assert uris.run_artifacts("r1", "a", "b.txt") == "s3://hanzo-ml/runs/r1/artifacts/a/b.txt"
    assert uris.run_code("r1", SHA256) == "s3://hanzo-ml/runs/r1/code/0123456789ab"
    assert uris.run_evaluation("r1") == "s3://hanzo-ml/runs/r1/evaluation"
    assert uris.final_checkpoint("r1", "adapter") == "s3://hanzo-ml/runs/r1/checkpoint-final/adapter"
    assert uris.run_checkpoints("r1") == "s3://hanzo-ml/checkpoints/r1"
    assert uris.base_model(SHA256) == f"s3://hanzo-models/base/{SHA256}"


def test_only_other_organizations_have_a_folder() -> None:
    assert uris.dataset_folder("d", None) == "s3://hanzo-ml/datasets/d"
    assert uris.dataset_folder("d", "a/b") == "s3://hanzo-ml/datasets/@a%2Fb/d"
    assert uris.model_folder("m", None) == "s3://hanzo-models/m"
    assert uris.model_folder("m", "acme") == "s3://hanzo-models/@acme/m"
    assert uris.organization_artifacts("default") == "s3://hanzo-ml/artifacts/@default"
    assert uris.parse_organization("@a%2Fb") == "a/b"
    assert uris.parse_organization("d") is None


def test_model_name_starting_with_at_sign_is_escaped() -> None:
    assert uris.model_folder("@acme", None) == "s3://hanzo-models/%40acme"


def test_run_id_is_read_from_run_uris_only() -> None:
    assert uris.parse_run_id("s3://hanzo-ml/runs/r1/record") == "r1"
    assert uris.parse_run_id("s3://hanzo-ml/checkpoints/r1/10") is None


def test_no_other_module_spells_out_a_storage_uri() -> None:
    files = [file for folder in PRODUCT_FOLDERS for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 300
    found = [str(file.relative_to(ROOT)) for file in files if any(spells_uri(text) for text in strings(file))]
    assert found == ["recipes/storage/uris.py"]


def spells_uri(text: str) -> bool:
    return "s3://hanzo-ml" in text or "s3://hanzo-models" in text


def strings(file: Path) -> Iterator[str]:
    """Yield the string constants of a module, without docstrings."""
    tree = ast.parse(file.read_text())
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value
