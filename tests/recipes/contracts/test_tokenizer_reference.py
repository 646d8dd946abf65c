"""The name of a tokenizer means its files: others of the same name are another one, and a model beside them is none."""

from pathlib import Path

import pytest

from recipes.contracts.job import BadConfiguration
from recipes.contracts.recipe import Recipe
from recipes.contracts.tokenizer_reference import folder_named, meaning


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
def test_other_files_are_another_tokenizer(folder: Path, file: str, as_path: bool) -> None:
    reference = str(folder) if as_path else folder.as_uri()
    before = meaning(reference)
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text("other")
    assert meaning(reference) != before


def test_what_lies_beside_a_tokenizer_is_neither_read_nor_counted(folder: Path) -> None:
    """A name may be that of a disk; no tokenizer is read from below its folder."""
    before = meaning(folder.as_uri())
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "checkpoint-10").mkdir()
    (folder / "checkpoint-10" / "tokenizer.json").write_text("other")
    (folder / "gone.json").symlink_to(folder / "nowhere")
    assert meaning(folder.as_uri()) == before


def test_a_folder_is_what_transformers_takes_for_one(folder: Path) -> None:
    assert folder_named(folder.as_uri()) == folder_named(str(folder)) == folder
    assert folder_named("zenlm/zen-72b") is None
    assert meaning("zenlm/zen-72b") == {}
    assert meaning("file:///there/is/none") == meaning("file:///nor/here"), "which the program refuses"


def test_a_recipe_is_its_base_model() -> None:
    base = Recipe.named("smollm2-135m-lora").base_model
    assert meaning("recipe:smollm2-135m-lora") == {"of_recipe": {"uri": base.uri, "sha256": base.sha256}}
    with pytest.raises(BadConfiguration, match="unknown recipe"):
        meaning("recipe:../secret")
