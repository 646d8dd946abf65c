"""Under sign-in, the server runs no user's command with its own rights."""

import itertools
from pathlib import Path

import pytest

from recipes.contracts.recipe import Recipe
from resources.jobs.submission import allow_base_model, allow_image
from resources.settings.settings import Settings
from tests.api.auth.conftest import SignedIn


@pytest.mark.parametrize("role", ["admin", "researcher"])
def test_command_job_is_refused_even_to_admin_under_sign_in(signed_in: SignedIn, role: str) -> None:
    client = getattr(signed_in.acme, role)
    before = client.get("/v1/jobs").json()["jobs"]
    answer = client.post("/v1/jobs", json={"name": "mine", "command": ["python", "train.py"]})
    assert answer.status_code == 403
    assert "submit one with a `recipe`" in answer.json()["message"]
    assert client.get("/v1/jobs").json()["jobs"] == before


def test_command_job_is_refused_to_viewer(signed_in: SignedIn) -> None:
    answer = signed_in.acme.viewer.post("/v1/jobs", json={"name": "mine", "command": ["true"]})
    assert answer.status_code == 403


def test_base_model_from_a_server_folder_is_refused_under_sign_in(signed_in: SignedIn) -> None:
    """The folder is read with the server's rights, and may hold what another organization trained."""
    for path, uri in itertools.product(("/v1/jobs", "/v1/jobs/estimate"), ("file:///etc", "FILE:///etc", " file:/etc")):
        base = {"base_model": {"uri": uri, "sha256": "0" * 64}}
        answer = signed_in.acme.admin.post(path, json={"name": "mine", "dataset": "d", "parameters": base})
        assert (answer.status_code, "names a folder of this server" in answer.text) == (403, True), answer.text


def test_custom_image_is_refused_under_sign_in(signed_in: SignedIn) -> None:
    """Its pods have keys to the data of every organization."""
    job = {"name": "mine", "dataset": "d", "parameters": {"image": "me/mine:1"}}
    answer = signed_in.acme.admin.post("/v1/jobs", json=job)
    assert (answer.status_code, "not allowed where users sign in" in answer.text) == (403, True), answer.text


def test_base_model_and_image_of_an_operators_recipe_are_allowed_under_sign_in(tmp_path: Path) -> None:
    settings = Settings.load({"HANZO_ML_HOME": str(tmp_path)})
    signing_in = settings.model_copy(update={"auth": settings.auth.model_copy(update={"verify_tokens": True})})
    base = {"uri": tmp_path.as_uri(), "sha256": "0" * 64}
    recipe = Recipe.named("smollm2-135m-lora").changed({"base_model": base, "image": "ours:1"})
    allow_base_model(signing_in, recipe.changed({"max_steps": 3}), recipe)
    allow_image(signing_in, recipe.changed({"max_steps": 3}), recipe)
