"""Where people sign in, nobody has this server run a command with the rights of its own user."""

import pytest

from tests.api.auth.conftest import SignedIn


@pytest.mark.parametrize("role", ["admin", "researcher"])
def test_a_command_is_refused_to_everybody_who_signs_in(signed_in: SignedIn, role: str) -> None:
    client = getattr(signed_in.acme, role)
    before = client.get("/v1/jobs").json()["jobs"]
    answer = client.post("/v1/jobs", json={"name": "mine", "command": ["python", "train.py"]})
    assert answer.status_code == 403
    assert "submit one with a `recipe`" in answer.json()["message"]
    assert client.get("/v1/jobs").json()["jobs"] == before


def test_a_viewer_is_refused_as_for_every_job(signed_in: SignedIn) -> None:
    answer = signed_in.acme.viewer.post("/v1/jobs", json={"name": "mine", "command": ["true"]})
    assert answer.status_code == 403
