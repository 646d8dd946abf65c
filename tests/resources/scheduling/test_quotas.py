"""Organization quotas: the specification's limits and their effect on a job's schedule."""

from typing import Any

import pytest

from recipes.contracts.job import Distributed, Hardware, Schedule
from resources.errors import HanzoError
from resources.scheduling.quotas import (
    Usage,
    apply_quota,
    count_gpus,
    refuse_impossible_job,
    refuse_oversized_sweep,
    waiting_reason,
)
from resources.settings.scheduler import Quota, Scheduler

RESEARCH = Quota(max_gpus=64, max_concurrent_jobs=8, priority="high")
COMMUNITY = Quota(max_gpus=16, max_concurrent_jobs=2, priority="low", preemptible=True)


@pytest.mark.requirement("J2")
def test_quotas_of_the_specification_load_and_the_default_is_none() -> None:
    quotas = {
        "research": {"max_gpus": 64, "max_concurrent_jobs": 8, "priority": "high"},
        "engineering": {"max_gpus": 32, "max_concurrent_jobs": 4, "priority": "medium"},
        "community": {"max_gpus": 16, "max_concurrent_jobs": 2, "priority": "low", "preemptible": True},
    }
    found = Scheduler.model_validate({"quotas": quotas}).quotas
    assert (found["research"], found["community"]) == (RESEARCH, COMMUNITY)
    assert Scheduler().quotas == {}


@pytest.mark.requirement("Z24")
@pytest.mark.parametrize(
    ("hardware", "distributed", "gpus"),
    [
        (Hardware(gpus=8), None, 8),
        (Hardware(), Distributed(num_nodes=4, gpus_per_node=8), 32),  # GPUs are per node
        (Hardware(gpus=1), Distributed(num_nodes=4, gpus_per_node=8), 32),
        (Hardware(gpus=1), Distributed(num_nodes=2, gpus_per_node=8, backend="gloo"), 2),
        (Hardware(), Distributed(num_nodes=2, gpus_per_node=8, backend="gloo"), 0),
    ],
)
def test_gpus_are_counted_on_all_nodes(hardware: Hardware, distributed: Distributed | None, gpus: int) -> None:
    assert count_gpus(hardware, distributed) == gpus


def test_job_waits_until_its_quota_has_a_slot_and_gpus() -> None:
    assert waiting_reason(COMMUNITY, Usage(), 16) == ""
    assert waiting_reason(COMMUNITY, Usage(gpus=8, jobs=1), 8) == ""
    words = "waits for its organization's quota: 8 of 16 GPUs are taken, and it asks for 9"
    assert waiting_reason(COMMUNITY, Usage(gpus=8, jobs=1), 9) == words
    assert waiting_reason(COMMUNITY, Usage(gpus=2, jobs=2), 0) == "waits for its organization's quota: 2 of 2 jobs run"
    assert waiting_reason(Quota(), Usage(gpus=10_000, jobs=10_000), 10_000) == ""


def test_job_larger_than_its_quota_is_refused_with_a_remedy() -> None:
    refuse_impossible_job(COMMUNITY, 16)
    refuse_impossible_job(None, 17)
    with pytest.raises(HanzoError, match=r"asks for 17 GPUs, and the quota of your organization is 16: ask for fewer"):
        refuse_impossible_job(COMMUNITY, 17)


def test_sweep_whose_trials_exceed_the_quota_is_refused() -> None:
    refuse_oversized_sweep(COMMUNITY, 2, 8)
    refuse_oversized_sweep(None, 50, 8)
    with pytest.raises(HanzoError, match="is 2 jobs at once: lower it to 2"):
        refuse_oversized_sweep(COMMUNITY, 3, 0)
    with pytest.raises(HanzoError, match=r"8 trials at once with 16 GPUs each are 128, .* lower max_concurrent_trials to 4"):
        refuse_oversized_sweep(RESEARCH, 8, 16)
    with pytest.raises(HanzoError, match=r"2 trials at once with 1 GPU each are 2, .* is 1: lower"):
        refuse_oversized_sweep(Quota(max_gpus=1), 2, 1)


@pytest.mark.requirement("Z28")
@pytest.mark.parametrize(
    ("quota", "given", "priority", "preemptible"),
    [
        (RESEARCH, {}, "high", False),
        (RESEARCH, {"priority": "low"}, "low", False),
        (COMMUNITY, {}, "low", True),
        (COMMUNITY, {"priority": "high", "preemptible": False}, "low", True),  # preemptible if either is
        (Quota(max_gpus=1), {}, "medium", False),
        (Quota(max_gpus=1), {"priority": "high", "preemptible": True}, "high", True),
        (None, {"priority": "high"}, "high", False),
    ],
)
def test_quota_sets_defaults_and_bounds_of_the_schedule(
    quota: Quota | None, given: dict[str, Any], priority: str, preemptible: bool
) -> None:
    found = apply_quota(Schedule.model_validate({"max_duration": "3h", **given}), quota)
    assert (found.priority, found.preemptible, found.max_duration) == (priority, preemptible, "3h")
