"""Under sign-in, jobs use only the Secrets, claims and variables that the operator permits."""

from pathlib import Path
from typing import Any

import pytest

from api.routes.v1.jobs import allow_command
from recipes.contracts.pod_settings import PodSettings
from recipes.contracts.recipe import Recipe
from resources.errors import HanzoError
from resources.jobs.submission import allow_image, allow_pod_settings, allow_variables
from resources.settings.settings import Settings
from tests.api.auth.conftest import SignedIn

POD: dict[str, Any] = {
    "secrets": ["wandb"],
    "image_pull_secrets": ["registry"],
    "volumes": [{"claim": "corpus", "path": "/corpus"}],
}


def settings_of(folder: Path, *, signs_in: bool = True, **scheduler: Any) -> Settings:
    settings = Settings.load({"HANZO_ML_HOME": str(folder)})
    auth = settings.auth.model_copy(update={"verify_tokens": signs_in})
    return settings.model_copy(update={"auth": auth, "scheduler": settings.scheduler.model_copy(update=scheduler)})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"pod": {"secrets": ["other-job-token"]}}, "scheduler.user_secrets"),
        ({"pod": {"image_pull_secrets": ["registry"]}}, "scheduler.user_secrets"),
        ({"pod": {"volumes": [{"claim": "corpus", "path": "/corpus"}]}}, "scheduler.user_claims"),
        ({"pod": {"node_selector": {"pool": "theirs"}}}, "scheduler.user_node_labels"),
        ({"pod": {"tolerations": [{"operator": "Exists"}]}}, "scheduler.user_tolerations"),
        ({"env": {"LD_PRELOAD": "/tmp/mine.so"}}, "rights of this server's own user"),
    ],
)
def test_unlisted_pod_setting_is_refused(signed_in: SignedIn, given: dict[str, Any], words: str) -> None:
    answer = signed_in.acme.admin.post("/v1/jobs", json={"name": "mine", "dataset": "d", **given})
    assert answer.status_code == 403 and words in answer.json()["message"], answer.text


def test_listed_secrets_and_claims_are_allowed(tmp_path: Path) -> None:
    pod = PodSettings.model_validate(POD)
    allow_pod_settings(settings_of(tmp_path, user_secrets=("wandb", "registry"), user_claims=("corpus",)), pod)
    allow_pod_settings(settings_of(tmp_path, signs_in=False), pod)
    with pytest.raises(HanzoError, match="'registry'"):
        allow_pod_settings(settings_of(tmp_path, user_secrets=("wandb",), user_claims=("corpus",)), pod)


def test_commands_and_images_are_allowed_with_one_namespace_per_organization(tmp_path: Path) -> None:
    own = settings_of(tmp_path, backend="kubernetes", namespace_per_organization=True)
    allow_command(own, from_own_user=False)
    recipe = Recipe.named("smollm2-135m-lora")
    allow_image(own, recipe.changed({"image": "me/mine:1"}), recipe)
    here = settings_of(tmp_path, namespace_per_organization=True)
    with pytest.raises(HanzoError, match="this server's own user"):
        allow_command(here, from_own_user=True)
    for refused in (here, settings_of(tmp_path, backend="kubernetes", user_commands=True)):
        with pytest.raises(HanzoError, match="image differs from the recipe's"):
            allow_image(refused, recipe.changed({"image": "me/mine:1"}), recipe)
    without_sign_in = settings_of(tmp_path, signs_in=False, backend="kubernetes", namespace_per_organization=True)
    with pytest.raises(HanzoError, match="only from that user"):
        allow_command(without_sign_in, from_own_user=False)


def test_commands_and_variables_are_allowed_on_a_cluster_where_the_operator_permits_them(tmp_path: Path) -> None:
    cluster = settings_of(tmp_path, backend="kubernetes", user_commands=True)
    allow_command(cluster, from_own_user=False)
    allow_variables(cluster, {"LD_PRELOAD": "/opt/lib.so"}, from_own_user=False)
    with pytest.raises(HanzoError):
        allow_command(settings_of(tmp_path, backend="kubernetes"), from_own_user=False)
    here = settings_of(tmp_path)
    with pytest.raises(HanzoError):
        allow_command(here, from_own_user=True)
    with pytest.raises(HanzoError):
        allow_variables(here, {"A": "b"}, from_own_user=True)
    with pytest.raises(HanzoError):
        allow_variables(settings_of(tmp_path, signs_in=False), {"A": "b"}, from_own_user=False)
