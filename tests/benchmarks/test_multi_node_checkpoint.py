"""The multi-node checkpoint benchmark transfers what it claims to measure, here on 2 MB."""

import multiprocessing
import sys

import pytest

from benchmarks.multi_node_checkpoint import Machine, main, measure
from tests.support.s3_server import S3Server

FAST = 1000.0
SPAWNED = multiprocessing.get_context("spawn")


def machines(saving: int) -> list[Machine]:
    return [Machine(number, of=2, saving=saving, megabytes=2, network=FAST) for number in (1, 2)]


def moved(s3: S3Server, method: str) -> list[str]:
    """Return the weight files transferred whole; of others only the header was read."""
    asked = [(each.path, each.headers.get("range", "bytes=0-")) for each in s3.requests if each.method == method]
    whole = (path for path, places in asked if places.startswith("bytes=0-") and places != "bytes=0-7")
    return sorted(path.rpartition("rows-")[2] for path in whole if "rows-" in path)


@pytest.mark.slow
def test_both_strategies_transfer_whole_or_partitioned_checkpoint_files(s3: S3Server) -> None:
    measure(machines(1), s3.url, SPAWNED)
    all_of_it = "00001-of-00001.safetensors"
    assert (moved(s3, "PUT"), moved(s3, "GET")) == ([all_of_it], [all_of_it] * 2)
    s3.requests.clear()
    measure(machines(2), s3.url, SPAWNED)
    parts = [f"0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert (moved(s3, "PUT"), moved(s3, "GET")) == (parts, parts)


@pytest.mark.slow
def test_benchmark_exits_when_a_machine_fails(s3: S3Server, capfd: pytest.CaptureFixture[str]) -> None:
    """The third part never exists.

    The benchmark used to wait forever for a report of the failed machine.
    """
    with pytest.raises(SystemExit, match="2 of 2 machines failed"):
        measure(machines(3), s3.url, SPAWNED)
    assert "the checkpoint is incomplete" in capfd.readouterr().err


def test_benchmark_prints_both_strategies_and_their_ratio(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["parts", "--machines", "2", "--megabytes", "2", "--network", f"{FAST}"])
    main()
    head, whole, parts, ratio = capsys.readouterr().out.splitlines()
    assert head.startswith("2 MB, 2 machines")
    assert (whole[:26].strip(), parts[:26].strip()) == ("one sends, all fetch all", "each its part and share")
    assert ratio.split()[0] == "ratio" and all(float(number) > 0 for number in ratio.split()[1:])
