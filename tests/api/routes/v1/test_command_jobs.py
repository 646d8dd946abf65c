"""POST /v1/jobs with a `command`: the specification's job file, and refusals by key."""

import asyncio
import base64
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from fastapi.testclient import TestClient

from api.routes.v1 import jobs
from hanzo_ml.cli.connection import iterate_pages
from hanzo_ml.cli.job import list_jobs
from hanzo_ml.cli.job import logs as print_logs
from recipes.contracts.command_job import MAX_CODE_BYTES
from recipes.contracts.job import Program
from recipes.storage.artifact_store import Store
from resources.compute.backends import open_backend
from resources.compute.base import JobRef
from resources.compute.local.backend import LocalCompute
from resources.jobs.command import read_command
from resources.metadata.database import Database
from resources.metadata.job_record import MASK
from resources.metadata.jobs import Jobs
from resources.metadata.outbox import emit, read_after
from resources.monitoring.usage_totals import count_queued_jobs
from resources.outbox_relay import to_record
from resources.settings.settings import Settings
from tests.support.api.command_job import SPECIFICATION
from tests.support.server_process import ServerProcess


def submitted(http: TestClient, **keys: Any) -> dict[str, Any]:
    answer = http.post("/v1/jobs", json={"name": "mine", "command": ["python", "train.py"], **keys})
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def test_specified_job_file_is_accepted_unchanged(http: TestClient) -> None:
    """Also before its dataset exists: it may be created while the job waits."""
    document = yaml.safe_load(SPECIFICATION)
    answer = http.post("/v1/jobs", json=document)
    document["env"]["HANZO_ML_TRACKING_URI"] = MASK
    assert answer.status_code == 201, answer.text
    job = http.get(f"/v1/jobs/{answer.json()['id']}").json()
    assert (job["type"], job["status"], job["name"]) == ("training", "queued", "zen-72b-finetune-finance")
    assert job["config"]["dataset"] == "finance-corpus-v3@7"
    for key, value in document.items():
        found = job["config"][key]
        assert found == value if not isinstance(value, dict) else found.items() >= value.items(), key
    run = http.get(f"/v1/runs/{job['id']}").json()
    assert (run["status"], run["tags"]["mlflow.source.name"]) == ("queued", "torchrun --nproc_per_node=8 train.py")
    experiment = http.get(f"/v1/experiments/{run['experiment_id']}").json()
    assert experiment["name"] == "zen-72b-finance"


def test_pod_settings_of_a_job_are_stored_as_given(http: TestClient) -> None:
    pod = {"image_pull_secrets": ["registry"], "node_selector": {"zone": "a"}}
    job = submitted(http, pod=pod)
    assert job["config"]["pod"].items() >= pod.items()
    assert "pod" not in submitted(http)["config"]
    for wrong in ({"pod": {"privileged": True}}, {"schedule": {"grace_period": "0s"}}, {"schedule": {"retries": -1}}):
        answer = http.post("/v1/jobs", json={"name": "mine", "command": ["true"], **wrong})
        assert answer.status_code == 400, answer.text


@pytest.mark.requirement("G1", "G6")
def test_command_job_is_listed_by_status_and_cancelled_with_its_run(http: TestClient) -> None:
    job = submitted(http)
    assert [found["id"] for found in http.get("/v1/jobs", params={"status": "queued"}).json()["jobs"]] == [job["id"]]
    assert http.post(f"/v1/jobs/{job['id']}/cancel").json()["status"] == "cancelled"
    assert http.get(f"/v1/runs/{job['id']}").json()["status"] == "cancelled"
    assert http.get("/v1/jobs", params={"status": "queued"}).json()["jobs"] == []


def test_jobs_are_listed_in_pages_and_the_command_line_follows_them(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a year all seventy thousand were in one response."""
    for name in ("pages-1", "pages-2", "pages-3"):
        httpx.post(f"{server.url}/v1/jobs", json={"name": name, "command": ["true"]}).raise_for_status()
    first = httpx.get(f"{server.url}/v1/jobs", params={"limit": 1}).json()
    assert [job["name"] for job in first["jobs"]] == ["pages-3"]
    following = {"limit": 2, "page_token": first["next_page_token"]}
    assert [job["name"] for job in httpx.get(f"{server.url}/v1/jobs", params=following).json()["jobs"]] == [
        "pages-2",
        "pages-1",
    ]
    for limit in ("0", "1001", "many"):
        assert httpx.get(f"{server.url}/v1/jobs", params={"limit": limit}).status_code == 400
    monkeypatch.setenv("HANZO_ML_TRACKING_URI", server.url)
    paged = list(iterate_pages("/v1/jobs", "jobs", {"limit": 1}))
    list_jobs(as_json=True)
    assert json.loads(capsys.readouterr().out) == paged and len(paged) >= 3


def test_experiment_defaults_to_the_job_name(http: TestClient) -> None:
    run = http.get(f"/v1/runs/{submitted(http, name='doors')['id']}").json()
    assert http.get(f"/v1/experiments/{run['experiment_id']}").json()["name"] == "doors"


def test_source_files_are_stored_as_an_artifact_outside_the_job_config(http: TestClient, settings: Settings) -> None:
    files = {"train.py": "print('ü')\n", "parts/words.py": "HELLO = 1\n"}
    job = submitted(http, files=files)
    assert "files" not in job["config"]
    code = job["config"]["code"]
    store = Store(settings.store)
    assert {path: store.get_bytes(f"{code['uri']}/{path}").decode() for path in files} == files
    found = store.find(code["uri"])
    assert found is not None and found.digest == code["digest"]


def test_log_of_a_running_command_is_shown(http: TestClient, settings: Settings) -> None:
    job = submitted(http)
    folder = settings.home / "jobs" / job["id"] / "command"
    folder.mkdir(parents=True)
    assert http.get(f"/v1/jobs/{job['id']}").json()["logs"] == []
    (folder / "log.txt").write_text("".join(f"epoch {number}\n" for number in range(1_000)))
    assert http.get(f"/v1/jobs/{job['id']}").json()["logs"] == [f"epoch {number}" for number in range(900, 1_000)]
    (folder / "log.txt").write_text("epoch 1\n")
    assert "data: epoch 1\n" in http.get(f"/v1/jobs/{job['id']}/logs", params={"follow": False}).text
    long = "x" * (3 << 20)
    (folder / "log.txt").write_text(f"epoch 1\n{long}\nhalf a li")
    assert len(str(http.get(f"/v1/jobs/{job['id']}").json()["logs"])) < 70_000
    stream = http.get(f"/v1/jobs/{job['id']}/logs", params={"follow": False}).text
    assert "".join(stream.replace("\n\n", "").split("data: ")).startswith(f"epoch 1{long}half a lievent: end")


@pytest.mark.requirement("G1")
def test_log_is_streamed_completely_with_unusual_line_separators(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text after a form feed or Unicode separator, or an unfinished last line, was missing."""
    job = httpx.post(f"{server.url}/v1/jobs", json={"name": "odd", "command": ["true"]}).json()["id"]
    folder = server.home / "jobs" / job / "command"
    folder.mkdir(parents=True)
    odd = [b"a\x0bb\x0cc\x1cd\xc2\x85e\xe2\x80\xa8f", b"\xff\xfe\x00", b"\x1b[31mred\x1b[0m", b"event: end", b"", b": x"]
    (folder / "log.txt").write_bytes(b"\n".join([*odd, b"Segmentation fault"]))
    monkeypatch.setenv("HANZO_ML_TRACKING_URI", server.url)
    print_logs(job)
    seen = [
        "a^Kb^Lc^\\d\\x85e\u2028f",
        "\ufffd\ufffd^@",
        "\x1b[31mred\x1b[0m",
        "event: end",
        "",
        ": x",
        "Segmentation fault",
    ]
    assert capsys.readouterr().out == "".join(f"{line}\n" for line in seen)


def test_terminal_control_sequences_in_logs_and_job_names_are_escaped(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One changed the window title, erased the screen and wrote to the clipboard."""
    body = {"name": "mine\x1b[2J\x1b]0;theirs\x07", "command": ["true"]}
    job = httpx.post(f"{server.url}/v1/jobs", json=body).json()["id"]
    folder = server.home / "jobs" / job / "command"
    folder.mkdir(parents=True)
    (folder / "log.txt").write_bytes(
        b"\x1b]0;theirs\x07\x1b[1;31mred\x1b[0m\t\x1b[2J\x1b[A7%\x1b]52;c;eA==\x1b\\\x08 \xc2\x9b2J"
    )
    monkeypatch.setenv("HANZO_ML_TRACKING_URI", server.url)
    monkeypatch.setenv("COLUMNS", "200")
    print_logs(job)
    assert capsys.readouterr().out == "^[]0;theirs^G\x1b[1;31mred\x1b[0m\t7%^[]52;c;eA==^[\\^H \\x9b2J\n"
    list_jobs(status=None)
    assert "mine^[[2J^[]0;theirs^G" in capsys.readouterr().out


def test_progress_bar_updates_are_streamed_as_lines(tmp_path: Path) -> None:
    """It ends its line only at the end: followers saw nothing for hours."""
    compute, job, log = LocalCompute(tmp_path), JobRef("job-1", Program.COMMAND), b""
    compute.folder(job).mkdir(parents=True)
    path = compute.folder(job) / "log.txt"
    for drawn in (b"begin\r\n", b"\r 3%|#", b"\r 6%|##", b"\r 9%|###\r", b"\n"):
        with path.open("ab") as file:
            file.write(drawn)
        log += (new := jobs.read_new_lines(compute, job, len(log), is_last=False))
        assert not drawn.startswith(b"\r 6") or new == b" 3%|#\r"
    assert log.splitlines() == [b"begin", b"", b" 3%|#", b" 6%|##", b" 9%|###"]


def test_followers_of_silent_jobs_do_not_block_other_requests(server: ServerProcess) -> None:
    """Each follower occupied one of the server's forty threads, even after it had disconnected."""
    job = httpx.post(f"{server.url}/v1/jobs", json={"name": "quiet", "command": ["true"]}).json()
    with ExitStack() as followers, httpx.Client(base_url=server.url, limits=httpx.Limits(max_connections=None)) as client:
        for _ in range(60):
            followers.enter_context(client.stream("GET", f"/v1/jobs/{job['id']}/logs", timeout=60))
        assert httpx.get(f"{server.url}/v1/jobs", timeout=60).status_code == 200
        assert httpx.get(f"{server.url}/alive", timeout=60).status_code == 200
    assert httpx.post(f"{server.url}/v1/jobs/{job['id']}/cancel", timeout=60).status_code == 200


def test_silent_log_stream_sends_keepalive_comments(
    http: TestClient, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queued job sent no byte for minutes, so that proxies closed the connection."""
    job = submitted(http)["id"]
    path = settings.home / "jobs" / job / "command" / "log.txt"
    monkeypatch.setattr(jobs, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0.001)

    async def followed() -> list[str]:
        chunks = []
        async for chunk in jobs.stream_log(database, open_backend(settings), Jobs(database).read(job), follow=True):
            chunks.append(chunk)
            if len(chunks) == 2:
                path.parent.mkdir(parents=True)
                path.write_text("epoch 1\n")
                Jobs(database).cancel(job)
        return chunks

    database = Database(settings.database_url)
    first, second, *rest = asyncio.run(followed())
    database.close()
    assert first == second == ": queued\n\n"
    assert rest[-2:] == ["data: epoch 1\n\n", "event: end\ndata: cancelled\n\n"]


def test_environment_values_are_masked_in_jobs_and_events(http: TestClient, settings: Settings) -> None:
    """They were visible to every user who lists jobs, and to event consumers."""
    env = {"HF_TOKEN": "hf_s3cr3t", "HANZO_ML_EXPERIMENT": "doors"}
    answer = http.post("/v1/jobs", json={"name": "mine", "command": ["true"], "env": env})
    job = answer.json()["id"]
    database = Database(settings.database_url)
    with database.write() as connection:  # as an earlier release wrote it
        emit(connection, "jobs", "job.submitted", job, {"job_id": job, "config": {"env": env}})
    documents = [answer.json(), http.get(f"/v1/jobs/{job}").json(), http.get("/v1/jobs").json()["jobs"][0]]
    documents.append(http.post(f"/v1/jobs/{job}/cancel").json())
    documents.append(http.post(f"/v1/jobs/{job}/resume").json())
    events = http.get("/v1/events", params={"type": "job.submitted"}).json()["events"]
    documents.extend(event["payload"] for event in events)
    assert [each["config"]["env"] for each in documents] == [{"HF_TOKEN": MASK, "HANZO_ML_EXPERIMENT": "doors"}] * 7
    kept = Jobs(database).read(job)
    assert (kept.status, read_command(kept).script.env) == ("queued", env)
    with database.read() as connection:
        records = [to_record(event, "hanzo.ml") for event in read_after(connection, 0, ["job.submitted"])]
    assert len(records) == 2 and not any(b"hf_s3cr3t" in record.value for record in records)
    database.close()


def test_job_file_containing_the_mask_is_refused(http: TestClient) -> None:
    refused = http.post("/v1/jobs", json={"name": "mine", "command": ["true"], "env": {"HF_TOKEN": MASK}})
    assert refused.status_code == 400 and refused.json()["message"].startswith("env.HF_TOKEN is the mask")


@pytest.mark.parametrize("memory", ["512 elephants", "512GB", "", "-1Gi"])
@pytest.mark.parametrize("by", ["command", "definition"])
def test_unreadable_memory_quantity_is_refused(http: TestClient, memory: str, by: str) -> None:
    asked: dict[str, Any] = {"command": ["true"], "resources": {"memory": memory}}
    if by == "definition":
        asked = {"model": "theirs", "parameters": {"hardware": {"memory": memory}}}
    answer = http.post("/v1/jobs", json={"name": "mine", **asked})
    assert answer.status_code == 400, answer.text
    assert f"memory '{memory}' is not a quantity" in answer.json()["message"]


def test_command_job_is_counted_in_the_queue_of_its_priority(http: TestClient, settings: Settings) -> None:
    submitted(http, schedule={"priority": "high"})
    database = Database(settings.database_url)
    with database.read() as connection:
        assert count_queued_jobs(connection) == {("default", "high"): 1.0}
    database.close()


@pytest.mark.parametrize("key", ["max_duration", "checkpoint_interval"])
@pytest.mark.parametrize("time", ["0s", "0.0h"])
@pytest.mark.parametrize("asked", [{"command": ["true"]}, {"model": "theirs"}], ids=["command", "recipe"])
def test_nonpositive_schedule_duration_is_refused(http: TestClient, asked: dict[str, Any], key: str, time: str) -> None:
    """A duration of zero was accepted, and every start failed."""
    answer = http.post("/v1/jobs", json={"name": "late", **asked, "schedule": {key: time}})
    assert (answer.status_code, answer.json()["message"]) == (
        400,
        f"schedule.{key} is {time}, but must be positive: set a duration such as 20m, or remove the key",
    )


@pytest.mark.requirement("A3", "G3")
@pytest.mark.parametrize("type", ["training", "eval", "conversion", "preprocessing"])
def test_every_specified_job_type_is_accepted_with_a_command(http: TestClient, type: str) -> None:
    assert submitted(http, type=type)["config"]["type"] == type


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"command": "python train.py"}, ("command", "valid list")),
        ({"command": []}, ("command", "at least 1")),
        ({"command": ["python", ""]}, ("command[1]",)),
        ({"command": ["python", "a\0b"]}, ("command[1]", "null character")),
        ({"name": ""}, ("name",)),
        ({"name": " \t"}, ("name", "blank")),
        ({"type": "inference"}, ("type", "training")),
        ({"env": {"A B": "x"}}, ("env", "'A B' is not a variable name")),
        ({"env": {"STEPS": 3}}, ("env.STEPS", "valid string")),
        ({"resources": {"gpu": 8}}, ("resources.gpu",)),
        ({"distributed": {"num_nodes": 0}}, ("distributed.num_nodes",)),
        ({"storage": {"datasets": "/home/me/data"}}, ("storage.datasets", "s3://hanzo-ml/datasets/NAME/VERSION/")),
        ({"storage": {"datasets": "s3://hanzo-ml/datasets/mine/"}}, ("storage.datasets", "NAME/VERSION")),
        ({"storage": {"checkpoints": "s3://hanzo-models/x/"}}, ("storage.checkpoints", "s3://hanzo-ml/checkpoints/FOLDER/")),
        ({"storage": {"checkpoints": "s3://hanzo-ml/checkpoints/a/../b"}}, ("storage.checkpoints",)),
        ({"schedule": {"max_duration": "2 days"}}, ("schedule.max_duration", "20m")),
        ({"schedule": {"checkpoint_interval": "hourly"}}, ("schedule.checkpoint_interval",)),
        ({"files": {"../train.py": ""}}, ("files", "no path inside")),
        ({"files": {"/train.py": ""}}, ("files", "no path inside")),
        ({"files": {"a\\b.py": ""}}, ("files", "character")),
        ({"files": {"a": "", "a/b.py": ""}}, ("files", "is below 'a'")),
        ({"files": {"manifest.json": ""}}, ("files", "another")),
        ({"files": {"train.py": "x" * (MAX_CODE_BYTES + 1)}}, ("files", "keep data in a dataset")),
        ({"source_tree": {"links": {"a": "/etc"}}}, ("source_tree", "leads out of the folder")),
        ({"source_tree": {"links": {"a/b/c": "../..", "z": "a/b/c/../x"}}}, ("source_tree", "leads out of the folder")),
        ({"source_tree": {"links": {"../a": "b"}}}, ("source_tree", "no path inside")),
        ({"files": {"a/b": ""}, "source_tree": {"links": {"a": "c"}}}, ("source_tree", "'a' must be an empty folder")),
        ({"files": {"a": ""}, "source_tree": {"folders": ["a"]}}, ("source_tree", "'a' is there twice")),
        ({"source_tree": {"modes": {"a": 0o755}}}, ("source_tree", "no 'a'")),
        ({"files": {"a": ""}, "source_tree": {"modes": {"a": 0o4755}}}, ("source_tree", "modes.a", "511")),
        ({"source_tree": {"encoded": {"a": base64.b64encode(bytes(MAX_CODE_BYTES + 1)).decode()}}}, ("dataset",)),
        ({"dataset": "mine"}, ("dataset",)),
    ],
)
def test_invalid_key_is_refused_in_one_line_naming_it(
    http: TestClient, keys: dict[str, Any], words: tuple[str, ...]
) -> None:
    answer = http.post("/v1/jobs", json={"name": "mine", "command": ["python", "train.py"], **keys})
    assert answer.status_code == 400, answer.text
    message = answer.json()["message"]
    assert "\n" not in message and "job with" not in message
    assert all(word in message for word in words), message
    assert http.get("/v1/jobs").json()["jobs"] == []


@pytest.mark.parametrize("type", ["eval", "conversion", "preprocessing"])
def test_job_types_other_than_training_require_a_command(http: TestClient, type: str) -> None:
    answer = http.post("/v1/jobs", json={"name": "mine", "dataset": "d", "type": type})
    assert (answer.status_code, "needs a `command`" in answer.json()["message"]) == (400, True)


def test_job_name_invalid_as_a_model_name_is_refused(http: TestClient) -> None:
    """Its version is registered under that name, hours later.

    That of a definition has the definition's name.
    """
    job = {"name": "mine/1", "recipe": "smollm2-135m-lora"}
    answer = http.post("/v1/jobs", json={**job, "dataset": "d"})
    assert (answer.status_code, "Invalid model name 'mine/1'" in answer.json()["message"]) == (400, True)
    assert http.post("/v1/jobs", json={**job, "model": "mine"}).status_code == 201


@pytest.mark.parametrize("body", [None, [], "text", 3])
def test_body_that_is_no_json_object_is_refused(http: TestClient, body: Any) -> None:
    answer = http.post("/v1/jobs", json=body)
    assert answer.status_code == 400
    assert answer.json()["message"].endswith("the request body a JSON object")


BODY = '{"name": "theirs", "command": ["touch", "/tmp/theirs"]}'
"""What a malicious page in the user's browser would run."""


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        # A form, or a script's request without a preflight: no page may send JSON to another origin without one.
        ({"Content-Type": "text/plain"}, 400),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 400),
        ({"Content-Type": "multipart/form-data; boundary=x"}, 400),
        ({}, 400),
        # Browsers add each of these, and no page can omit them.
        ({"Content-Type": "application/json", "Origin": "https://evil.example"}, 403),
        ({"Content-Type": "application/json", "Origin": "null"}, 403),
        # An attacker's host name that resolves to this machine.
        ({"Content-Type": "application/json", "Host": "evil.example"}, 403),
    ],
)
def test_browser_page_cannot_submit_a_command_job(http: TestClient, headers: dict[str, str], status: int) -> None:
    answer = http.post("/v1/jobs", content=BODY.encode(), headers=headers)
    assert answer.status_code == status, answer.text
    assert http.get("/v1/jobs").json()["jobs"] == []


def test_cors_preflight_is_refused(http: TestClient) -> None:
    asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    answer = http.options("/v1/jobs", headers={**asked, "Access-Control-Request-Headers": "content-type"})
    assert not answer.is_success
    assert not [name for name in answer.headers if name.lower().startswith("access-control")]


@pytest.mark.parametrize("parameters", [{"system_prompt": "\0"}, {"hardware": {"gpus": 0, "gpu_type": "\0"}}])
def test_job_with_values_no_database_stores_is_refused(http: TestClient, parameters: dict[str, Any]) -> None:
    answer = http.post("/v1/jobs", json={"name": "n", "model": "mine", "parameters": parameters})
    assert answer.status_code == 400 and "cannot be stored" in answer.text


@pytest.mark.parametrize("keys", [{"name": "a\0"}, {"name": "a\ud800"}, {"files": {"a.py": "\ud800"}}])
def test_refused_command_job_stores_no_source_files(http: TestClient, settings: Settings, keys: dict[str, Any]) -> None:
    """They stayed in the store; half a surrogate pair was a server error."""
    document = {"name": "n", "command": ["python", "a.py"], "files": {"a.py": "print(1)"}, **keys}
    answer = http.post("/v1/jobs", content=json.dumps(document), headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert Store(settings.store).list("s3://hanzo-ml/runs") == []
