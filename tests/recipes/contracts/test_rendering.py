"""Documents from before there were two renderings keep theirs and serialize unchanged."""

import json

from recipes.contracts.job import Job, Program, StoreAddress
from recipes.contracts.rendering import CURRENT_RENDERING, Rendering


def job() -> Job:
    return Job(
        id="j",
        program=Program.TRAIN,
        result_uri="s3://hanzo-ml/x/result.json",
        store=StoreAddress(root="file:///objects", buckets={}),
        cache_dir="/cache",
    )


def test_new_job_renders_records_as_served() -> None:
    assert job().rendering is CURRENT_RENDERING is Rendering.AS_SERVED
    assert Job.model_validate_json(job().model_dump_json()) == job()


def test_job_without_rendering_key_keeps_rendering_as_stored() -> None:
    document = job().model_dump(mode="json")
    del document["rendering"]
    before = Job.model_validate_json(json.dumps(document))
    assert before.rendering is Rendering.AS_STORED
    assert before.work_digest == job().work_digest
    assert before.model_dump(mode="json") == document
