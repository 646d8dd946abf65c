"""A recipe's container image is pinned."""

import pytest

from recipes.contracts.job import BadConfiguration
from recipes.contracts.recipe import Recipe

DIGEST = "@sha256:" + "0a" * 32


@pytest.mark.parametrize(
    "image",
    ["me/mine:1.2", "registry.example.com:5000/team/mine:3f2a9c1", f"me/mine{DIGEST}", f"me/mine:latest{DIGEST}", "mine:v1"],
    ids=str,
)
def test_image_with_tag_or_digest_is_accepted(image: str) -> None:
    assert Recipe.named("zen-7b-lora").changed({"image": image}).image == image


@pytest.mark.requirement("G8")
@pytest.mark.parametrize(
    "image", ["me/mine", "me/mine:latest", "registry:5000/mine", "Mine:1", "me/mine:1 --privileged", ""]
)
def test_mutable_or_invalid_image_reference_is_refused(image: str) -> None:
    with pytest.raises(
        BadConfiguration, match=r"job parameters: 'image': .*(may change at any time: use|is not an image: write)"
    ):
        Recipe.named("zen-7b-lora").changed({"image": image})


def test_recipe_without_image_omits_its_key() -> None:
    assert "image" not in Recipe.named("zen-7b-lora").model_dump(mode="json")
