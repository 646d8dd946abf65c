"""POST /v1/datasets/{id}/prepare: a job with its parent and parameters, or refusals by key."""

from typing import Any

import pytest
from fastapi.testclient import TestClient


@pytest.fixture
def dataset(http: TestClient) -> str:
    made = http.post(
        "/v1/datasets", data={"name": "d"}, files={"files": ("d.jsonl", b'{"text": "She keeps it.", "empty": null}\n')}
    )
    assert made.status_code == 201, made.text
    identifier: str = made.json()["id"]
    return identifier


SPECIFICATION: dict[str, Any] = {
    "tokenize": {"tokenizer": "zenlm/zen-72b", "max_length": 8192, "output_format": "arrow"},
    "filter": {"min_length": 64, "max_length": 8192, "dedup": True, "language": "en"},
    "augment": {"shuffle_seed": 42, "oversample_minority": True, "mask_pii": True},
}


@pytest.mark.requirement("C1")
def test_specified_preparation_example_is_queued_as_a_job(http: TestClient, dataset: str) -> None:
    answer = http.post(f"/v1/datasets/{dataset}/prepare", json={**SPECIFICATION, "workers": 2, "pods": 3})
    assert answer.status_code == 201, answer.text
    job = http.get(f"/v1/jobs/{answer.json()['id']}").json()
    assert (job["type"], job["status"]) == ("preparation", "queued")
    assert (job["config"]["dataset"], job["config"]["name"]) == ("d@1", "d")
    assert (job["config"]["workers"], job["config"]["pods"]) == (2, 3)
    for section, keys in SPECIFICATION.items():
        assert job["config"]["parameters"][section].items() >= keys.items()
    cancelled = http.post(f"/v1/jobs/{job['id']}/cancel").json()
    assert cancelled["status"] == "cancelled"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"filter": {"min_length": 64}}, "count tokens: set tokenize.tokenizer"),
        ({"filter": {"dedupe": True}}, "dedupe"),
        ({"name": "../x"}, "is not allowed"),
        ({"workers": 0}, "workers"),
        ({"pods": 0}, "pods"),
        (
            {"split": {"group_by": "clas"}},
            "no record of dataset d@1 has the column 'clas' of split.group_by: it has empty, text",
        ),
        ({"split": {"group_by": "empty"}}, "the column 'empty' of split.group_by is null in all records of dataset d@1"),
        ({"split": {"column": "fold"}}, "the column 'fold' of split.column"),
        ({"augment": {"oversample_minority": True, "class_column": "clas"}}, "'clas' of augment.class_column"),
        ({"tokenize": {"tokenizer": "recipe:nothing"}}, "tokenize.tokenizer: unknown recipe 'nothing': use one of"),
        ({"filter": {"toxicity": {"words": ["bad", " "]}}}, "an empty word is in every text: remove it"),
        (
            {"tokenize": {"tokenizer": "t"}, "filter": {"min_length": 65, "max_length": 64}},
            "it is less than min_length, which is 65: no record could be kept",
        ),
        ({"split": {"column": "text", "group_by": "text"}}, "remove one of them"),
        ({"filter": {"toxicity": {"threshold": 0.9}}}, "filter.toxicity rejects nothing: set words, a detector or both"),
        ({"filter": {"near_dedup": {"threshold": 1.5}}}, "filter.near_dedup.threshold"),
        ({"filter": {"near_dedup": {"seed": -1}}}, "filter.near_dedup.seed"),
        ({"split": {"validation": 0.5, "test": 0.5}}, "together must be less than 1"),
    ],
)
def test_invalid_preparation_is_refused_at_submission(
    http: TestClient, dataset: str, body: dict[str, Any], words: str
) -> None:
    answer = http.post(f"/v1/datasets/{dataset}/prepare", json=body)
    assert 400 <= answer.status_code < 500
    assert words in answer.text


def test_preparing_a_missing_version_is_not_found(http: TestClient) -> None:
    assert http.post("/v1/datasets/nothing/prepare", json={}).status_code == 404
