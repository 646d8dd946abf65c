"""Pod settings of a job: validation before anything is created, and unchanged existing documents."""

from typing import Any

import pytest
from pydantic import ValidationError

from recipes.contracts.command_job import CommandJob
from recipes.contracts.job import Distributed, Elastic, Job, Program, Schedule, StoreAddress
from recipes.contracts.pod_settings import PodSettings, Toleration, VolumeClaim


def test_job_without_pod_settings_omits_their_keys() -> None:
    job = Job(
        id="1", program=Program.TRAIN, result_uri="", store=StoreAddress(root="file:///s", buckets={}), cache_dir="",
        distributed=Distributed(num_nodes=2),
    )  # fmt: skip
    document = job.model_dump(mode="json")
    assert not {"env", "pod"} & set(document)
    assert set(document["schedule"]) == {"max_duration", "checkpoint_interval", "preemptible", "priority"}
    assert "elastic" not in document["distributed"]
    asked = CommandJob.model_validate({"name": "n", "command": ["true"]})
    assert "pod" not in asked.model_dump(mode="json")
    assert Job.model_validate_json(job.model_dump_json()) == job


def test_pod_settings_round_trip_without_changing_the_work_digest() -> None:
    pod = PodSettings(secrets=("wandb",), volumes=(VolumeClaim(claim="data", path="/data"),), node_selector={"zone": "a"})
    schedule = Schedule(grace_period="1.5m", retries=0)
    shape = Distributed(num_nodes=4, elastic=Elastic(min_nodes=3))
    job = Job(
        id="1", program=Program.TRAIN, result_uri="", store=StoreAddress(root="file:///s", buckets={}), cache_dir="",
        env={"A": "b"}, pod=pod, schedule=schedule, distributed=shape,
    )  # fmt: skip
    read = Job.model_validate_json(job.model_dump_json())
    assert read == job and (read.pod, read.env) == (pod, {"A": "b"})
    assert read.schedule.grace_seconds == 90 and read.schedule.shutdown_seconds < 90
    plain = job.model_copy(update={"pod": PodSettings(), "env": {}, "schedule": Schedule(), "distributed": None})
    assert read.work_digest == plain.work_digest


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"secrets": ["My_Secret"]}, "is not a name of a Kubernetes object"),
        ({"volumes": [{"claim": "data", "path": "data"}]}, "is not an absolute path"),
        ({"volumes": [{"claim": "data", "path": "/data/../etc"}]}, "is not an absolute path"),
        ({"volumes": [{"claim": "data", "path": "/"}]}, "is not an absolute path"),
        ({"volumes": [{"claim": "data", "path": "/work/job"}]}, "is in /work, which pods use already"),
        ({"volumes": [{"claim": "data", "path": "/dev/shm"}]}, "is in /dev, which pods use already"),
        ({"volumes": [{"claim": "data", "path": "/d", "sub_path": "../other"}]}, "is not a folder of the volume"),
        ({"volumes": [{"claim": "a", "path": "/d"}, {"claim": "b", "path": "/d"}]}, "two volumes have the path '/d'"),
        ({"node_selector": {"zone": "not ok"}}, "is not a label of a node"),
        ({"tolerations": [{"value": "true"}]}, "a toleration without a key accepts every taint"),
        ({"tolerations": [{"key": "k", "operator": "Exists", "value": "v"}]}, "operator Exists takes no value"),
        ({"tolerations": [{"key": "k", "effect": "Never"}]}, "NoSchedule"),
        ({"privileged": True}, "privileged"),
    ],
)
def test_pod_settings_invalid_on_a_cluster_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        PodSettings.model_validate(given)


def test_pod_settings_valid_on_clusters_are_accepted() -> None:
    assert VolumeClaim(claim="data.of-us", path="/workspace").read_only
    assert Toleration(operator="Exists").key is None
    assert Toleration(key="cloud.google.com/gke-spot", value="true", effect="NoSchedule").operator == "Equal"


def test_elastic_min_nodes_must_be_less_than_num_nodes() -> None:
    with pytest.raises(ValidationError, match="must be less than num_nodes"):
        Distributed(num_nodes=2, elastic=Elastic(min_nodes=2))
