"""A tokenizer is identified by the content of its own files, not by its path."""

from pathlib import Path

import pytest

from recipes.contracts.job import BadConfiguration
from recipes.contracts.recipe import Recipe
from recipes.contracts.tokenizer_reference import describe_reference, parse_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "a model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.mark.parametrize(
    "file", ["tokenizer.json", "chat_template.jinja", "vocab.txt", "spiece.model", "additional_chat_templates/rag.jinja"]
)
@pytest.mark.parametrize("as_path", [True, False])
def test_tokenizer_identity_depends_on_its_files(folder: Path, file: str, as_path: bool) -> None:
    reference = str(folder) if as_path else folder.as_uri()
    before = describe_reference(reference)
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text("other")
    assert describe_reference(reference) != before


def test_files_other_than_the_tokenizer_do_not_change_its_identity(folder: Path) -> None:
    """The path may be a whole disk; subfolders are never read for a tokenizer."""
    before = describe_reference(folder.as_uri())
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "checkpoint-10").mkdir()
    (folder / "checkpoint-10" / "tokenizer.json").write_text("other")
    (folder / "gone.json").symlink_to(folder / "nowhere")
    assert describe_reference(folder.as_uri()) == before


def test_tokenizer_folder_is_recognized_by_path_or_uri(folder: Path) -> None:
    assert parse_folder(folder.as_uri()) == parse_folder(str(folder)) == folder
    assert parse_folder("zenlm/zen-72b") is None
    assert describe_reference("zenlm/zen-72b") == {}
    assert describe_reference("file:///there/is/none") == describe_reference("file:///nor/here"), "which the program refuses"


def test_recipe_tokenizer_reference_is_its_base_model() -> None:
    base = Recipe.named("smollm2-135m-lora").base_model
    assert describe_reference("recipe:smollm2-135m-lora") == {"of_recipe": {"uri": base.uri, "sha256": base.sha256}}
    with pytest.raises(BadConfiguration, match="unknown recipe"):
        describe_reference("recipe:../secret")
