"""Gateway with real processes and tiny models: deploy, swap under load, refuse, survive kills."""

import hashlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from recipes.storage.artifact_store import hash_file
from resources.errors import (
    BadRequest,
    ChecksumMismatch,
    EngineError,
    EngineUnavailable,
    SmokeFailed,
    UnknownModel,
)
from resources.serving.client import EngineClient
from tests.resources.serving.gateway_process import ROOT, Gateway, wait_until
from tests.support.free_ports import free_port
from tests.support.resources.gateway import PROMPTS, Load, Model, broken, models

__all__ = ["models"]


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    gateway = Gateway(tmp_path / "state")
    yield gateway
    gateway.kill()


def deploy(gateway: Gateway, model: Model, version: int = 1, name: str = "keeper") -> None:
    gateway.engine.deploy(name, version, model.path, model.sha256, PROMPTS)


def copied(model: Model, target: Path) -> Model:
    shutil.copy(model.path, target)
    return Model(target, model.sha256)


def test_deployed_model_answers_requests(gateway: Gateway, models: list[Model]) -> None:
    served = gateway.engine.deploy("keeper", 3, models[0].path, models[0].sha256, PROMPTS)
    assert (served.status, served.version, served.sha256) == ("serving", 3, models[0].sha256)
    assert served.loaded_at is not None
    assert [result.prompt for result in served.smoke] == list(PROMPTS)
    assert all(result.answer for result in served.smoke)
    assert gateway.engine.served() == [served]
    assert gateway.engine.chat("keeper", PROMPTS[0], max_tokens=16) == served.smoke[0].answer

    listed = httpx.get(f"{gateway.url}/v1/models").json()["data"]
    assert [(model["id"], model["version"]) for model in listed] == [("keeper", 3)]
    answer = httpx.post(f"{gateway.url}/v1/completions", json={"prompt": "The lamp", "max_tokens": 4})
    assert answer.json()["model"] == "keeper"
    assert answer.headers["X-Hanzo-Model-SHA256"] == models[0].sha256


def test_answers_are_streamed(gateway: Gateway, models: list[Model]) -> None:
    deploy(gateway, models[0])
    body = {"prompt": "The lamp", "max_tokens": 32, "stream": True, "ignore_eos": True, "temperature": 0}
    with httpx.stream("POST", f"{gateway.url}/v1/completions", json=body) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    assert events[-1] == "[DONE]"
    assert len([json.loads(event)["choices"] for event in events[:-1]]) > 8


@pytest.mark.requirement("P1")
@pytest.mark.slow
@pytest.mark.parametrize("streams", [False, True])
def test_a_swap_under_load_fails_no_request(gateway: Gateway, models: list[Model], streams: bool) -> None:
    deploy(gateway, models[0])
    first = gateway.engine.chat("keeper", PROMPTS[0], max_tokens=8)
    with Load(gateway, streams) as load:
        for version in range(1, 6):
            if version > 1:
                deploy(gateway, models[(version + 1) % 2], version)
            wait_until(partial(load.has_met, version))
    assert load.failures == []
    assert gateway.engine.served()[0].version == 5
    deploy(gateway, models[1], 6)
    assert gateway.engine.chat("keeper", PROMPTS[0], max_tokens=8) != first
    wait_until(lambda: len(gateway.backends()) == 1)


def test_a_request_that_is_answered_during_a_swap_is_finished(gateway: Gateway, models: list[Model]) -> None:
    deploy(gateway, models[0])
    body = {"prompt": "The lamp", "max_tokens": 400, "stream": True, "ignore_eos": True, "temperature": 0}
    with httpx.stream("POST", f"{gateway.url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        deploy(gateway, models[1], 2)
        assert gateway.engine.served()[0].version == 2
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert len(rest) > 100


@pytest.mark.requirement("P6", "X7")
def test_a_wrong_checksum_is_refused_and_nothing_changes(gateway: Gateway, models: list[Model], tmp_path: Path) -> None:
    deploy(gateway, models[0])
    before, pids = gateway.engine.served(), [process.pid for process in gateway.backends()]
    flipped = tmp_path / "flipped.gguf"
    content = bytearray(models[1].path.read_bytes())
    content[-1] ^= 1
    flipped.write_bytes(content)
    with pytest.raises(ChecksumMismatch, match="restore the file or register it again") as refusal:
        deploy(gateway, Model(flipped, models[1].sha256), 2)
    assert refusal.value.details["expected"] == models[1].sha256
    assert refusal.value.details["found"] == hashlib.sha256(content).hexdigest()
    assert gateway.engine.served() == before
    assert [process.pid for process in gateway.backends()] == pids
    body = {"name": "keeper", "version": 2, "path": str(flipped), "sha256": models[1].sha256}
    answer = httpx.post(f"{gateway.url}/deployments", json=body)
    assert (answer.status_code, answer.json()["error_code"]) == (409, "CHECKSUM_MISMATCH")


@pytest.mark.requirement("I14")
def test_model_with_non_finite_outputs_is_refused(gateway: Gateway, models: list[Model], tmp_path: Path) -> None:
    deploy(gateway, models[0])
    before = gateway.engine.served()
    with pytest.raises(SmokeFailed, match="not finite") as refusal:
        deploy(gateway, broken(models[1], tmp_path / "nan.gguf"), 2)
    assert refusal.value.details["prompt"] == PROMPTS[0]
    assert gateway.engine.served() == before
    assert gateway.engine.chat("keeper", PROMPTS[0], max_tokens=16) == before[0].smoke[0].answer
    wait_until(lambda: len(gateway.backends()) == 1)


def test_file_that_is_not_a_model_is_refused(gateway: Gateway, models: list[Model], tmp_path: Path) -> None:
    rubbish = tmp_path / "rubbish.gguf"
    rubbish.write_bytes(models[0].path.read_bytes()[:5000])
    with pytest.raises(SmokeFailed, match="does not load"):
        deploy(gateway, Model(rubbish, hash_file(rubbish)))
    with pytest.raises(BadRequest, match="cannot read"):
        deploy(gateway, Model(tmp_path / "missing.gguf", models[0].sha256))
    assert gateway.engine.served() == []
    assert gateway.backends() == []


def test_a_state_that_cannot_be_written_changes_nothing(gateway: Gateway, models: list[Model]) -> None:
    deploy(gateway, models[0])
    before = gateway.engine.served()
    (gateway.state_dir / "deployments.json.part").mkdir()  # simulates a full disk, because root may write everywhere else
    with pytest.raises(EngineError, match="cannot write the engine's state"):
        deploy(gateway, models[1], 2)
    assert gateway.engine.served() == before
    wait_until(lambda: len(gateway.backends()) == 1)


def test_a_killed_backend_comes_back_and_requests_wait_for_it(gateway: Gateway, models: list[Model]) -> None:
    deploy(gateway, models[0])
    with Load(gateway) as load:
        for _ in range(2):
            (backend,) = gateway.backends()
            backend.kill()
            wait_until(lambda: not backend.is_running() and len(gateway.backends()) == 1)  # noqa: B023
            wait_until(lambda: gateway.engine.served()[0].status == "serving")
    assert load.failures == []
    assert load.versions


def test_killed_backend_is_not_restarted_on_a_changed_file(gateway: Gateway, models: list[Model], tmp_path: Path) -> None:
    copy = copied(models[0], tmp_path / "copy.gguf")
    deploy(gateway, copy)
    shutil.copy(models[1].path, copy.path)
    assert gateway.engine.chat("keeper", PROMPTS[0], max_tokens=16) == gateway.engine.served()[0].smoke[0].answer
    gateway.backends()[0].kill()
    wait_until(lambda: gateway.engine.served()[0].status == "refused")
    assert f"has SHA-256 {models[1].sha256}" in str(gateway.engine.served()[0].reason)
    with pytest.raises(EngineUnavailable, match=r"'keeper' is not served: .* has SHA-256"):
        gateway.engine.chat("keeper", "Who?")


@pytest.mark.slow
def test_a_killed_gateway_leaves_nothing_and_serves_again(gateway: Gateway, models: list[Model]) -> None:
    deploy(gateway, models[0], 4)
    answer = gateway.engine.chat("keeper", PROMPTS[0], max_tokens=8)
    orphans = gateway.backends()
    gateway.kill()
    gone, alive = psutil.wait_procs(orphans, timeout=10)
    assert (len(gone), alive) == (1, [])
    gateway.start()
    assert gateway.engine.chat("keeper", PROMPTS[0], max_tokens=8) == answer, "a request right after the start waits"
    assert [(model.version, model.status) for model in gateway.engine.served()] == [(4, "serving")]


@pytest.mark.slow
def test_a_restart_refuses_a_file_that_changed(gateway: Gateway, models: list[Model], tmp_path: Path) -> None:
    copy = copied(models[0], tmp_path / "copy.gguf")
    deploy(gateway, copy, name="changed")
    deploy(gateway, models[1])
    orphans = gateway.backends()
    gateway.kill(signal.SIGTERM)
    assert psutil.wait_procs(orphans, timeout=10)[1] == []
    shutil.copy(models[1].path, copy.path)
    gateway.start()
    wait_until(lambda: all(model.status != "loading" for model in gateway.engine.served()))
    assert {model.name: model.status for model in gateway.engine.served()} == {
        "changed": "refused",
        "keeper": "serving",
    }
    assert [model["id"] for model in httpx.get(f"{gateway.url}/v1/models").json()["data"]] == ["keeper"]


def test_models_are_chosen_by_name(gateway: Gateway, models: list[Model]) -> None:
    with pytest.raises(EngineUnavailable, match="no model is deployed"):
        gateway.engine.chat("keeper", "Who?")
    deploy(gateway, models[0])
    deploy(gateway, models[1], name="other")
    assert gateway.engine.chat("keeper", PROMPTS[0]) != gateway.engine.chat("other", PROMPTS[0])
    with pytest.raises(UnknownModel, match="no model 'missing' is deployed: deployed are keeper, other"):
        gateway.engine.chat("missing", "Who?")
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json={"messages": []})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "the field 'model' is missing: deployed are keeper, other"
    gateway.engine.remove("other")
    wait_until(lambda: len(gateway.backends()) == 1)
    with pytest.raises(UnknownModel, match="no model 'other' is deployed"):
        gateway.engine.remove("other")


def test_a_model_is_served_by_any_name_that_the_registry_takes(gateway: Gateway, models: list[Model]) -> None:
    """Regression: a model with such a name was promoted, but every deployment failed."""
    name = "-dépôt π? 50%"
    deploy(gateway, models[0], name=name)
    asked = {"model": name, "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 4}
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=asked, timeout=60)
    assert answer.status_code == 200 and answer.headers["X-Hanzo-Model"] == "-d%C3%A9p%C3%B4t%20%CF%80%3F%2050%"
    gateway.engine.remove(name)
    assert gateway.engine.served() == []


@pytest.mark.slow
def test_removal_of_a_deployment_leaves_a_later_one(gateway: Gateway, models: list[Model]) -> None:
    """Also with an organization prefix, since two organizations may use the same model name."""
    for organization, model in (("acme/", models[0]), ("a%20b/", models[1])):
        gateway.engine.deploy(f"{organization}keeper", 1, model.path, model.sha256, PROMPTS, deployment=7)
    assert gateway.engine.chat("acme/keeper", PROMPTS[0]) != gateway.engine.chat("a%20b/keeper", PROMPTS[0])
    with pytest.raises(UnknownModel):
        gateway.engine.remove("a%20b/keeper", 6)
    assert {served.name for served in gateway.engine.served()} == {"acme/keeper", "a%20b/keeper"}
    gateway.kill()
    gateway.start()
    gateway.engine.remove("a%20b/keeper", 7)
    assert [served.name for served in gateway.engine.served()] == ["acme/keeper"]


def test_bad_requests_get_one_line(gateway: Gateway, models: list[Model]) -> None:
    answer = httpx.post(f"{gateway.url}/deployments", json={"name": "keeper", "version": 0})
    assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
    assert answer.json()["message"].startswith("'version': ")
    deploy(gateway, models[0])
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", content=b"{")
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "the body is not valid JSON")
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json={"messages": 3})
    assert answer.status_code == 400, "the backend's own refusals pass through"


@pytest.mark.parametrize("taken", ["port", "state folder"])
def test_second_gateway_names_the_port_or_folder_in_use(gateway: Gateway, tmp_path: Path, taken: str) -> None:
    port = gateway.port if taken == "port" else free_port()
    folder = gateway.state_dir if taken == "state folder" else tmp_path / "other"
    command = [sys.executable, "-m", "resources.serving.gateway", "--port", str(port), "--state-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 78
    expected = f"port {port} is in use" if taken == "port" else f"another gateway uses {folder}"
    assert done.stderr.startswith(f"error: {expected}")
    assert done.stderr.count("\n") == 1


def test_missing_engine_is_reported_in_one_line() -> None:
    with pytest.raises(EngineUnavailable, match=r"no inference engine answers at .*: start it with python -m"):
        EngineClient(f"http://127.0.0.1:{free_port()}").served()
