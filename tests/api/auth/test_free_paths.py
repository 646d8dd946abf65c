"""Organizations are isolated on free artifact paths and on custom artifact locations."""

import pytest

from tests.api.auth.conftest import MLFLOW, SignedIn, made

pytestmark = pytest.mark.requirement("W5")

PROXY = "/api/2.0/mlflow-artifacts/artifacts"


def test_same_free_path_is_separate_for_each_organization(signed_in: SignedIn) -> None:
    for organization in (signed_in.acme, signed_in.rival):
        made(organization.researcher.put(f"{PROXY}/shared/name.txt", content=organization.name.encode()))
    for organization in (signed_in.acme, signed_in.rival):
        assert organization.viewer.get(f"{PROXY}/shared/name.txt").text == organization.name
        assert made(organization.viewer.get(PROXY))["files"] == [{"path": "shared", "is_dir": True}]
    made(signed_in.rival.admin.delete(f"{PROXY}/shared/name.txt"))
    assert signed_in.acme.viewer.get(f"{PROXY}/shared/name.txt").text == signed_in.acme.name
    assert signed_in.acme.viewer.put(f"{PROXY}/shared/name.txt", content=b"x").status_code == 403
    assert signed_in.acme.researcher.delete(f"{PROXY}/shared/name.txt").status_code == 403


def test_free_path_cannot_reach_another_organizations_folder(signed_in: SignedIn) -> None:
    made(signed_in.acme.admin.put(f"{PROXY}/secret.txt", content=b"secret of acme"))
    for path in ("secret.txt", "@acme/secret.txt", "acme/secret.txt", "artifacts/@acme/secret.txt"):
        assert signed_in.rival.admin.get(f"{PROXY}/{path}").status_code == 404
    for source in ("s3://hanzo-ml/artifacts/@acme/secret.txt", "mlflow-artifacts:/secret.txt"):
        body = {"name": signed_in.rival.ids["model"], "source": source}
        assert signed_in.rival.admin.post(f"{MLFLOW}/model-versions/create", json=body).status_code in (400, 404)


def test_run_at_a_custom_location_is_hidden_from_other_organizations(signed_in: SignedIn) -> None:
    acme, rival = signed_in.acme.admin, signed_in.rival.admin
    body = {"name": "at a place", "artifact_location": "mlflow-artifacts:/place"}
    experiment = made(acme.post(f"{MLFLOW}/experiments/create", json=body))["experiment_id"]
    info = made(acme.post(f"{MLFLOW}/runs/create", json={"experiment_id": experiment}))["run"]["info"]
    path = info["artifact_uri"].removeprefix("mlflow-artifacts:/")
    made(acme.put(f"{PROXY}/{path}/f.txt", content=b"secret of acme"))
    assert rival.get(f"{PROXY}/{path}/f.txt").status_code == 404
    assert rival.get(PROXY, params={"path": path}).json()["files"] == []
    # What the rival writes there is stored in the rival's folder.
    made(rival.put(f"{PROXY}/{path}/f.txt", content=b"the rival's"))
    assert acme.get(f"{PROXY}/{path}/f.txt").text == "secret of acme"
    model = signed_in.rival.ids["model"]
    version = {"name": model, "source": f"{info['artifact_uri']}/f.txt", "run_id": info["run_id"]}
    assert rival.post(f"{MLFLOW}/model-versions/create", json=version).status_code == 404


def test_relative_artifact_location_is_refused_under_sign_in(signed_in: SignedIn) -> None:
    answer = signed_in.acme.admin.post(
        f"{MLFLOW}/experiments/create", json={"name": "relative", "artifact_location": "my_location"}
    )
    assert answer.status_code == 400 and "relative path is not allowed" in answer.json()["message"]
