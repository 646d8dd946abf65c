"""Object names: DNS-1123, stable per job, unique, short enough for derived pod names."""

import pytest

from recipes.contracts.job import Job, Program, StoreAddress
from resources.compute.kubernetes.gang import object_name
from tests.resources.compute.kubernetes.schemas import LABEL

HEX = "15b7c536c11a40a0938c709f2b8b4758"
IDS = [
    HEX,
    HEX.upper(),
    "my-run",
    "My-Run",
    "my_run",
    "my.run",
    "run 1",
    "-",
    "_",
    "é",
    "7",
    "train",
    "train-",
    f"train-{HEX}",
    f"evaluate-{HEX}",
    "split-a_very_long_dataset.name-with-all-there-is-12-0123456789ab",
    "x" * 256,
    "x" * 255,
]


def name(identifier: str, program: Program, generation: int = 1) -> str:
    store = StoreAddress(root="file:///s", buckets={})
    job = Job(id=identifier, program=program, result_uri="", store=store, work_dir="", cache_dir="")
    return object_name(job, generation)


@pytest.mark.parametrize("program", Program)
@pytest.mark.parametrize("identifier", IDS, ids=range(len(IDS)))
def test_gang_name_is_a_dns_label_with_room_for_pod_suffixes(identifier: str, program: Program) -> None:
    found = name(identifier, program)
    assert LABEL.fullmatch(found) and found[0].isalpha()  # a Service name must begin with a letter
    assert len(f"{found}-node-0-9999-abcde") <= 63
    assert found == name(identifier, program)


def test_no_two_jobs_share_a_name() -> None:
    names = [name(identifier, program) for identifier in IDS for program in Program]
    assert len(set(names)) == len(names)


def test_gang_name_contains_the_program_and_id() -> None:
    assert name(HEX, Program.TRAIN) == f"train-{HEX}"
    assert name("My_Run.7", Program.TRAIN).startswith("train-my-run-7-")
    assert name(f"evaluate-{HEX}", Program.EVALUATE).startswith(f"evaluate-{HEX[:20]}")


def test_later_generation_has_a_distinct_name_within_the_limit() -> None:
    assert name(HEX, Program.TRAIN, 2) == f"train-{HEX}-g2"
    names = [name(identifier, program, 99) for identifier in IDS for program in Program]
    assert len(set(names)) == len(names)
    assert all(LABEL.fullmatch(found) and len(f"{found}-node-0-9999-abcde") <= 63 for found in names)
