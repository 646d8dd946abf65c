"""Dagster's own storage and ours on the same files, alternately and concurrently."""

import threading
from collections.abc import Callable
from pathlib import Path

import dagster as dg
import pytest
import yaml
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.scheduler.instigation import TickData, TickStatus
from dagster._daemon.types import DaemonHeartbeat
from sqlalchemy import Engine, event

from resources.installation import SOURCE
from resources.orchestration.instance import render_instance_config, sqlite_storage_config
from resources.orchestration.sqlite_storage import PooledScheduleStorage

LOOK = TickData("origin", "looks", InstigatorType.SENSOR, TickStatus.SUCCESS, 1.0, [], [], selector_id="selector")
QUIET = {"telemetry": {"enabled": False}}


def instance(home: Path, **configuration: object) -> dg.DagsterInstance:
    (home / "dagster.yaml").write_text(yaml.safe_dump(QUIET | configuration))
    return dg.DagsterInstance.from_config(str(home))


def ours(home: Path) -> dg.DagsterInstance:
    """Yield an instance as `hanzo-ml up` configures it."""
    made = render_instance_config((SOURCE / "dagster.yaml").read_text(), sqlite_storage_config(home), 1)
    return instance(home, storage=made["storage"])


@dg.asset
def made() -> int:
    return 1


@pytest.mark.parametrize(("first", "then"), [(instance, ours), (ours, instance)])
def test_own_and_original_storage_read_each_other(
    tmp_path: Path, first: Callable[[Path], dg.DagsterInstance], then: Callable[[Path], dg.DagsterInstance]
) -> None:
    with first(tmp_path) as one:
        run = dg.materialize([made], instance=one).run_id
        one.create_tick(LOOK)
        logged = [str(entry.dagster_event) for entry in one.all_logs(run)]
    with then(tmp_path) as other:
        assert [found.run_id for found in other.get_runs()] == [run]
        assert [str(entry.dagster_event) for entry in other.all_logs(run)] == logged
        seen = other.get_latest_materialization_event(dg.AssetKey("made"))
        assert seen is not None and seen.run_id == run
        (tick,) = other.get_ticks("origin", "selector")
        assert tick.tick_data.instigator_name == "looks"


def test_stack_uses_the_pooled_storage_which_opens_each_file_once(tmp_path: Path) -> None:
    opened: list[object] = []

    def note(connection: object, record: object) -> None:
        opened.append(connection)

    with ours(tmp_path) as one:
        assert isinstance(one.schedule_storage, PooledScheduleStorage)
        dg.materialize([made], instance=one)
        event.listen(Engine, "connect", note)
        try:
            for _ in range(10):
                assert len(one.get_runs()) == 1
                assert one.get_ticks("origin", "selector") == []
                assert one.get_latest_materialization_event(dg.AssetKey("made"))
        finally:
            event.remove(Engine, "connect", note)
    assert len(opened) <= 3  # runs, ticks and events; Dagster's own storage opens one for each query


def test_two_instances_write_at_the_same_time(tmp_path: Path) -> None:
    """As the daemon and a run do, from several threads each."""
    with ours(tmp_path) as one, ours(tmp_path) as other:
        problems: list[Exception] = []

        def work(with_: dg.DagsterInstance) -> None:
            try:
                for _ in range(10):
                    with_.create_tick(LOOK)
                    with_.add_daemon_heartbeat(DaemonHeartbeat(1.0, "SENSOR", "a daemon", []))
                    with_.get_ticks("origin", "selector")
            except Exception as problem:
                problems.append(problem)

        threads = [threading.Thread(target=work, args=(each,)) for each in (one, other, one, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert problems == []
        assert len(one.get_ticks("origin", "selector")) == 40
