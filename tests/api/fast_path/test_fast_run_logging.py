"""Fast path of logging calls: responses and rows equal the regular path's."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api.auth.permissions import LOCAL
from api.fast_path.middleware import whole_body
from api.fast_path.run_logging import (
    Decode,
    WriteCall,
    decode_log_batch,
    decode_log_metric,
    decode_log_parameter,
    decode_set_tag,
)
from resources.errors import ErrorCode, HanzoError
from resources.metadata.database import Database
from resources.metadata.writes.group_commit import RunWriter

RUNS = "/api/2.0/mlflow/runs"
SHORT = {"Content-Type": "application/json"}
COMFORTABLE = {"Content-Type": "Application/json"}
"""An equivalent spelling; only the one that all clients use takes the fast path."""

odd: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, "", "5", " 5", "5.5", "NaN", "-Infinity", "nan", 1, -1, 0, 5.0, 5.5, 1e300, 2**63, 2**64, -(2**63), [], {}]
)
keys = st.sampled_from(["loss", "a/b", "ü", "a" * 250, "a" * 251, "a//b", "", "a\n", "\x00"]) | odd
values = st.sampled_from(["x", "y", "ü" * 10, "x" * 9000, "a\x00"]) | odd
pair = st.fixed_dictionaries({"key": keys}, optional={"value": values, "extra": odd})
metric = st.fixed_dictionaries(
    {"key": keys, "value": odd | st.floats(), "timestamp": odd | st.just(7)},
    optional={
        "step": odd | st.just(3),
        "model_id": st.sampled_from(["", "m-unknown"]) | odd,
        "dataset_name": odd,
        "dataset_digest": odd,
        "extra": odd,
    },
)
run_ids = st.fixed_dictionaries(
    {}, optional={"run_id": st.sampled_from(["RUN", "RUN", "RUN", "unknown", ""]) | odd, "run_uuid": st.just("RUN") | odd}
)
batch = st.fixed_dictionaries(
    {},
    optional={
        "metrics": st.lists(metric, max_size=2) | odd,
        "params": st.lists(pair, max_size=2) | odd,
        "tags": st.lists(pair, max_size=2) | odd,
    },
)
calls = st.one_of(
    st.tuples(st.just("log-metric"), metric),
    st.tuples(st.just("log-batch"), batch),
    st.tuples(st.just("log-parameter"), pair),
    st.tuples(st.just("set-tag"), pair),
)


def new_run(http: TestClient) -> str:
    return str(http.post(f"{RUNS}/create", json={"experiment_id": "0", "run_name": "first"}).json()["run"]["info"]["run_id"])


def outcome(http: TestClient, call: str, text: bytes, run: str, headers: dict[str, str]) -> tuple[int, Any, Any]:
    """Return the response to a call and the run's contents afterwards, without the run id."""
    answer = http.post(f"{RUNS}/{call}", content=text.replace(b"RUN", run.encode()), headers=headers)
    held = http.get(f"{RUNS}/get", params={"run_id": run}).json()["run"]
    said = json.dumps(answer.json()).replace(run, "RUN")
    return answer.status_code, said, (held["info"]["run_name"], held["data"])


def check_both_ways(http: TestClient, call: str, text: bytes) -> None:
    assert outcome(http, call, text, new_run(http), SHORT) == outcome(http, call, text, new_run(http), COMFORTABLE)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(call=calls, named=run_ids)
def test_any_field_value_is_handled_equally_on_both_paths(
    http: TestClient, call: tuple[str, dict[str, Any]], named: dict[str, Any]
) -> None:
    path, body = call
    check_both_ways(http, path, json.dumps({**named, **body}).encode())


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_json_is_handled_equally_on_both_paths(http: TestClient, data: st.DataObject) -> None:
    """Bytes of a valid body are replaced, removed or inserted.

    Only bodies that the fast path accepts can differ.
    """
    text = bytearray(b'{"run_id":"RUN","key":"loss","value":1.5,"timestamp":7,"x":{"y":["z",-1e5,null,true]}}')
    place = data.draw(st.integers(0, len(text) - 1))
    put = data.draw(
        st.sampled_from([b'"', b"\\", b"\\n", b"\\x", b"{", b"}", b",", b"0", b"-", b".", b"NaN", b"\xff", b"\x01"])
    )
    text[place : place + data.draw(st.integers(0, 1))] = put
    if decode_log_metric(bytes(text), None) is not None:
        check_both_ways(http, "log-metric", bytes(text))


OF_METRIC = {"key": "k", "value": 1.5, "timestamp": 1, "step": 2, "model_id": "", "dataset_name": "d", "dataset_digest": "1"}
OF_PAIR = {"key": "k", "value": "1"}
USUAL: dict[str, tuple[Decode, dict[str, Any]]] = {
    "log-metric": (decode_log_metric, {"run_uuid": "r", **OF_METRIC}),
    "log-batch": (decode_log_batch, {"metrics": [{"run_id": "r", **OF_METRIC}], "params": [OF_PAIR], "tags": [OF_PAIR]}),
    "log-parameter": (decode_log_parameter, {"run_uuid": "r", **OF_PAIR}),
    "set-tag": (decode_set_tag, {"run_uuid": "r", **OF_PAIR}),
}
"""With every member that MLflow's clients send."""


@pytest.mark.parametrize("call", USUAL)
def test_common_body_takes_the_fast_path(call: str) -> None:
    decode, body = USUAL[call]
    found = decode(json.dumps({"run_id": "r", **body}).encode(), "o")
    assert found is not None
    assert (found.run_id, found.organization) == ("r", "o")


@pytest.mark.parametrize("call", USUAL)
def test_body_with_an_unknown_field_falls_back_to_the_regular_path(call: str) -> None:
    decode, body = USUAL[call]
    assert decode(json.dumps({"run_id": "r", "runId": "s", **body}).encode(), "o") is None


def test_large_chunked_body_arrives_complete(http: TestClient) -> None:
    run = new_run(http)
    metrics = [{"key": f"k{number}", "value": number, "timestamp": number, "step": 1} for number in range(1000)]
    text = json.dumps({"run_id": run, "metrics": metrics}).encode()
    parts = (text[start : start + 7000] for start in range(0, len(text), 7000))
    assert http.post(f"{RUNS}/log-batch", content=parts, headers=SHORT).json() == {}
    assert len(http.get(f"{RUNS}/get", params={"run_id": run}).json()["run"]["data"]["metrics"]) == 1000


def test_setting_the_run_name_tag_renames_the_run(http: TestClient) -> None:
    run = new_run(http)
    http.post(f"{RUNS}/set-tag", json={"run_id": run, "key": "mlflow.runName", "value": "second"})
    assert http.get(f"{RUNS}/get", params={"run_id": run}).json()["run"]["info"]["run_name"] == "second"


async def nothing() -> Any:
    await asyncio.Event().wait()


def test_stalled_clients_do_not_block_other_logging_clients(tmp_path: Path) -> None:
    """A stalled client uses no capacity before its body begins.

    After that it uses only the capacity of clients in the same state.
    """
    scope = {"headers": [(b"content-type", b"application/json")], "state": {"caller": LOCAL}}

    async def something() -> Any:
        return {"type": "http.request", "body": b"no JSON", "more_body": False}

    def a_part() -> Any:
        first = iter([{"type": "http.request", "body": b"{", "more_body": True}])

        async def receive() -> Any:
            return next(first, None) or await nothing()

        return receive

    async def others(*_: Any) -> None:
        raise AssertionError

    async def test() -> None:
        writer = RunWriter(Database(f"sqlite:///{tmp_path}/metadata.db"))
        writer.slots, writer.arriving = asyncio.Semaphore(1), asyncio.Semaphore(1)
        call = WriteCall(decode_log_metric, writer)
        holding = [asyncio.ensure_future(call(scope, receive, others)) for receive in (nothing, a_part(), a_part())]
        await asyncio.sleep(0.01)
        assert writer.arriving.locked()
        assert await asyncio.wait_for(call(scope, something, others), 20) is not None
        for each in holding:
            each.cancel()

    asyncio.run(test())


def test_incomplete_body_times_out_with_a_retryable_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.fast_path.middleware.BODY_SECONDS", 0.01)
    with pytest.raises(HanzoError, match="send it again") as refused:
        asyncio.run(whole_body({"type": "http.request", "body": b"{", "more_body": True}, nothing))
    assert refused.value.code is ErrorCode.TEMPORARILY_UNAVAILABLE
