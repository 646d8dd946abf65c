"""The metric buffer sends every value exactly once despite crashes."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import httpx
import pytest

from hanzo_ml.client.buffer import MetricBuffer
from hanzo_ml.client.points import Point
from hanzo_ml.client.repeated_steps import RepeatedSteps
from hanzo_ml.client.transport import Refused, Transport, Unavailable
from tests.support.server_process import ServerProcess

LONG = 60.0


def new_run(server: ServerProcess) -> str:
    answer = httpx.post(f"{server.url}/api/2.0/mlflow/runs/create", json={"experiment_id": "0"})
    return str(answer.json()["run"]["info"]["run_id"])


def history(server: ServerProcess, run_id: str, key: str) -> list[tuple[int, float]]:
    query = {"run_id": run_id, "metric_key": key}
    points = httpx.get(f"{server.url}/api/2.0/mlflow/metrics/get-history", params=query).json()["metrics"]
    return [(point["step"], point["value"]) for point in points]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.001)


class FakeServer:
    """A server in memory that can be unavailable, lose its response, or refuse one key."""

    def __init__(self) -> None:
        self.away = threading.Event()
        self.asked = threading.Event()
        self.stored: list[Point] = []
        self.batches: list[int] = []
        self.newest: dict[str, int] = {}
        self.lose_answers = 0
        self.refuse_key = ""
        self.closed = False

    def log_metrics(self, run_id: str, points: Sequence[Point]) -> None:
        self.asked.set()
        if self.away.is_set():
            raise Unavailable("away")
        if any(point.key == self.refuse_key for point in points):
            raise Refused("bad key")
        self.batches.append(len(points))
        self.stored += [point for point in points if point not in self.stored]
        if self.lose_answers:
            self.lose_answers -= 1
            raise Unavailable("the answer was lost")

    def newest_steps(self, run_id: str) -> dict[str, int]:
        self.asked.set()
        if self.away.is_set():
            raise Unavailable("away")
        return self.newest

    def history(self, run_id: str, key: str) -> Iterator[tuple[int, int]]:
        return ((point.step, point.timestamp) for point in self.stored if point.key == key)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def fake() -> FakeServer:
    return FakeServer()


class KillingTransport(Transport):
    """Kills the server at chosen requests: before receipt, or after commit but before the response."""

    def __init__(self, server: ServerProcess) -> None:
        super().__init__(server.url)
        self.server = server
        self.killed = threading.Event()
        self.up = threading.Event()
        self.up.set()
        self.before = {5}
        self.after = {1, 3}
        self.requests = 0

    def log_metrics(self, run_id: str, points: Sequence[Point]) -> None:
        assert self.up.wait(LONG)
        self.requests += 1
        if self.requests in self.before:
            self.die()
        super().log_metrics(run_id, points)
        if self.requests in self.after:
            self.die()
            raise Unavailable("the answer was lost")

    def die(self) -> None:
        self.up.clear()
        self.server.kill()
        self.killed.set()


@pytest.mark.requirement("T4")
@pytest.mark.slow
def test_metrics_arrive_exactly_once_despite_repeated_server_kills(server: ServerProcess) -> None:
    run_id = new_run(server)
    transport = KillingTransport(server)
    buffer = MetricBuffer(server.url, run_id, transport)
    steps = 6000
    for step in range(steps):
        buffer.add("train/loss", step / 7, step)
        buffer.add("train/lr", step * 1e-6, step)
    for _ in range(len(transport.before | transport.after)):
        assert transport.killed.wait(LONG)
        transport.killed.clear()
        assert buffer.pending()
        server.start()
        transport.up.set()
    assert buffer.close(LONG) == []
    assert history(server, run_id, "train/loss") == [(step, step / 7) for step in range(steps)]
    assert history(server, run_id, "train/lr") == [(step, step * 1e-6) for step in range(steps)]


def test_resumed_run_logs_every_metric_exactly_once(server: ServerProcess) -> None:
    run_id = new_run(server)
    first = MetricBuffer(server.url, run_id)
    for step in range(10):
        first.add("loss", float(step), step, timestamp=1000 + step)
    assert first.flush(LONG)
    checkpoint = [Point("loss", 8.0, 8, 1008), Point("loss", 9.0, 9, 1009), Point("eval", 0.5, 9, 1009)]
    for step in range(10, 15):
        first.add("loss", float(step), step)
    assert first.close(LONG) == []

    resumed = MetricBuffer(server.url, run_id)
    resumed.skip_until(9, pending=checkpoint)
    for step in range(10, 20):
        resumed.add("loss", float(step), step)
    assert resumed.close(LONG) == []
    assert history(server, run_id, "loss") == [(step, float(step)) for step in range(20)]
    assert history(server, run_id, "eval") == [(9, 0.5)]


def test_a_deleted_run_ends_the_sending_without_disturbing_training(server: ServerProcess) -> None:
    buffer = MetricBuffer(server.url, "0" * 32)
    buffer.add("loss", 1.0, 1)
    assert buffer.close(LONG) == []
    assert [point.key for point in buffer.refused] == ["loss"]


def test_upload_keeps_the_requested_name(server: ServerProcess) -> None:
    run_id = new_run(server)
    path = server.home / "weights.bin"
    path.write_bytes(b"w" * 3_000_000)
    transport = Transport(server.url)
    transport.upload(f"0/{run_id}/artifacts", "checkpoint/step-{step} é", path)
    with pytest.raises(Refused, match="Invalid path"):
        transport.upload(f"0/{run_id}/artifacts", "a#b", path)
    transport.close()
    where = server.home / "objects/hanzo-ml-checkpoints/runs" / run_id / "artifacts/checkpoint/step-{step} é"
    assert where.read_bytes() == path.read_bytes()


def test_batch_with_a_lost_answer_is_resent_in_order(fake: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    """Each outage is logged once: an hour without the server must not fill the log."""
    fake.lose_answers = 2
    buffer = MetricBuffer("", "run", fake)
    for step in range(2500):
        buffer.add("loss", float(step), step, timestamp=step)
    assert buffer.flush(LONG)
    fake.lose_answers = 1
    buffer.add("loss", 2500.0, 2500, timestamp=2500)
    assert buffer.close(LONG) == []
    assert [point.step for point in fake.stored] == list(range(2501))
    assert max(fake.batches) <= 1000
    assert [record.message for record in caplog.records] == [
        "the tracking server is unavailable, metrics are queued: the answer was lost"
    ] * 2


def test_adding_does_not_block_during_a_server_outage(fake: FakeServer) -> None:
    fake.away.set()
    buffer = MetricBuffer("", "run", fake)
    for step in range(5000):
        buffer.add("loss", float(step), step, timestamp=step)
    assert fake.asked.wait(LONG)
    assert [point.step for point in buffer.pending()] == list(range(5000))
    assert not buffer.flush(0)
    fake.away.clear()
    assert buffer.flush(LONG)
    assert [point.step for point in fake.stored] == list(range(5000))


def test_closing_returns_unsent_points_for_another_buffer(fake: FakeServer) -> None:
    fake.away.set()
    buffer = MetricBuffer("", "run", fake)
    buffer.add("loss", 1.0, 1, timestamp=1)
    left = buffer.close(0)
    assert left == [Point("loss", 1.0, 1, 1)]
    wait_until(lambda: fake.closed)
    fake.away.clear()
    heir = MetricBuffer("", "run", fake)
    heir.skip_until(1, pending=left)
    assert heir.close(LONG) == []
    assert fake.stored == left


def test_refused_value_does_not_block_the_others(fake: FakeServer) -> None:
    fake.refuse_key = "bad//key"
    fake.away.set()
    buffer = MetricBuffer("", "run", fake)
    for step in range(100):
        buffer.add("bad//key" if step == 37 else "loss", float(step), step, timestamp=step)
    fake.away.clear()
    assert buffer.close(LONG) == []
    assert [point.step for point in fake.stored] == [step for step in range(100) if step != 37]
    assert [point.step for point in buffer.refused] == [37]


def test_points_are_sent_only_after_the_server_reported_its_newest_steps(fake: FakeServer) -> None:
    fake.away.set()
    fake.newest = {"loss": 12}
    buffer = MetricBuffer("", "run", fake)
    buffer.skip_until(10, pending=[Point("loss", 10.0, 10, 9), Point("eval", 9.0, 10, 9)])
    buffer.add("loss", 11.0, 11)
    assert fake.asked.wait(LONG)
    fake.away.clear()
    assert buffer.flush(LONG)
    for step in range(12, 15):
        buffer.add("loss", float(step), step)
    assert buffer.close(LONG) == []
    assert [(point.key, point.step) for point in fake.stored] == [("eval", 10), ("loss", 13), ("loss", 14)]


def test_step_computed_twice_before_its_checkpoint_is_logged_once(server: ServerProcess) -> None:
    """The first process was killed after it had sent a step.

    The second repeated the step during an outage, and saved it as pending.
    """
    run_id = new_run(server)
    first = MetricBuffer(server.url, run_id)
    first.add("loss", 0.5, 10, timestamp=1000)
    assert first.close(LONG) == []
    server.kill()
    second = MetricBuffer(server.url, run_id)
    second.skip_until(9)
    second.add("loss", 0.5, 10, timestamp=2000)
    second.add("eval", 0.7, 10, timestamp=2000)
    checkpoint = second.pending()
    assert second.close(0) == checkpoint and len(checkpoint) == 2
    server.start()
    third = MetricBuffer(server.url, run_id)
    third.skip_until(10, pending=checkpoint)
    assert third.close(LONG) == []
    assert history(server, run_id, "loss") == [(10, 0.5)]
    assert history(server, run_id, "eval") == [(10, 0.7)]


def test_repeated_step_is_logged_exactly_once_more_despite_kills(server: ServerProcess) -> None:
    """Steps 8 and 9 diverged.

    A process that repeated them was killed after sending them, before its checkpoint.
    """
    run_id = new_run(server)
    first = MetricBuffer(server.url, run_id)
    for step in range(10):
        first.add("loss", float(step), step, timestamp=1000 + step)
    assert first.close(LONG) == []
    for others in ((8, 9), (8, 9, 10)):
        buffer = MetricBuffer(server.url, run_id)
        buffer.skip_until(5, [RepeatedSteps(range(8, 10), 1500)])
        for step in (6, 7, *others):
            buffer.add("loss", 0.5 if step > 7 else float(step), step)
        assert buffer.close(LONG) == []
    logged = history(server, run_id, "loss")
    assert sorted(logged) == sorted([(step, float(step)) for step in range(10)] + [(8, 0.5), (9, 0.5), (10, 0.5)])


def test_a_long_history_is_read_page_by_page(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id, transport = new_run(server), Transport(server.url)
    transport.log_metrics(run_id, [Point("loss", 1.0, step, 10 * step) for step in range(7)])
    monkeypatch.setattr(sys.modules[Transport.__module__], "POINTS_PER_PAGE", 3)
    assert [*transport.history(run_id, "loss")] == [(step, 10 * step) for step in range(7)]
    assert [*transport.history(run_id, "nothing")] == []
    transport.close()


def test_a_bug_in_sending_does_not_end_the_sender(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def broken(run_id: str, points: Sequence[Point]) -> None:
        calls.append(len(points))
        if len(calls) < 3:
            raise ZeroDivisionError
        FakeServer.log_metrics(fake, run_id, points)

    monkeypatch.setattr(fake, "log_metrics", broken)
    buffer = MetricBuffer("", "run", fake)
    buffer.add("loss", 1.0, 1)
    assert buffer.close(LONG) == []
    assert len(fake.stored) == 1
