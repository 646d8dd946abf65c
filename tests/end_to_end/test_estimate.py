"""An estimate compared with a real run."""

import json
import re
from typing import Any

import pytest

from tests.end_to_end.conftest import STEPS, Baseline
from tests.end_to_end.local_stack import LocalStack


@pytest.fixture(scope="module")
def found(stack: LocalStack, baseline: Baseline, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    config = tmp_path_factory.mktemp("estimate") / "job.yaml"
    config.write_text(json.dumps({"name": "again", "dataset": "colours", "parameters": baseline.parameters}))
    return dict(json.loads(stack.hanzo_ml("job", "estimate", "--config", str(config), "--json").stdout))


def test_a_job_is_estimated_from_the_run_of_the_same_job(found: dict[str, Any], baseline: Baseline) -> None:
    assert found["source"].startswith("measured: ")
    assert baseline.job in [run["run_id"] for run in found["past_runs"]]
    assert found["steps"] == STEPS
    assert found["tokens"] == STEPS * 6 * 5 * 256
    assert found["dollars"] == {"low": 0.0, "likely": 0.0, "high": 0.0}
    hours = found["hours"]
    assert 0 < hours["low"] <= hours["likely"] <= hours["high"]


@pytest.mark.requirement("D2")
def test_estimated_dataset_tokens_match_the_trainers_count(
    stack: LocalStack, baseline: Baseline, found: dict[str, Any]
) -> None:
    """Both use the tokenizer and chat template that the job stored."""
    assert found["dataset"]["source"] == "counted, with the base model's tokenizer"
    log = (stack.trainer(baseline.job) / "log.txt").read_text()
    counts = re.findall(r"([\d,]+) records, ([\d,]+) tokens", log)
    records, trained = ([int(number.replace(",", "")) for number in numbers] for numbers in zip(*counts, strict=True))
    # The trainer reads train and validation; the test split has the same kind of records.
    whole = sum(trained) / sum(records) * 600
    assert abs(found["dataset"]["count"] / whole - 1) < 0.01


def test_estimated_memory_follows_the_base_models_configuration(
    found: dict[str, Any],
) -> None:
    weights = found["memory"]["parts"]["weights"]
    # Embedding, two blocks of q, k, v, o, gate, up, down and two norms, and the last norm, in float32.
    vocabulary = 400
    block = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
    assert weights <= 4 * (vocabulary * 64 + 2 * block + 64)
    assert weights > 4 * 2 * block
    assert found["memory"]["where"] == "the host"
