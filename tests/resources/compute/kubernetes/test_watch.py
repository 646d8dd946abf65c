"""Mirrors: local copies that survive expired versions, broken and silent watch streams."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from resources.compute.kubernetes import watch
from resources.compute.kubernetes.cluster import POD, ClusterUnavailable
from resources.compute.kubernetes.watch import Mirror
from tests.resources.compute.kubernetes.api_server import ApiServer, Item, serving_controller


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with serving_controller() as server:
        yield server


def pod(name: str, **labels: str) -> Item:
    metadata = {"name": name, "namespace": "n", "labels": labels, "managedFields": ["much"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": {"phase": "Pending"}}


def names(mirror: Mirror) -> list[str]:
    return sorted(item["metadata"]["name"] for item in mirror.items())


def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never happened")


def test_mirror_follows_changes_and_keeps_the_last_state_of_deleted_objects(server: ApiServer) -> None:
    server.put(pod("a", app="ours"))
    server.put(pod("b", app="theirs"))
    changed = threading.Event()
    mirror = Mirror(server.cluster, POD, changed.set, "app=ours")
    assert not mirror.is_synced
    mirror.start()
    until(lambda: mirror.is_synced)
    assert names(mirror) == ["a"] and "managedFields" not in mirror.items()[0]["metadata"]
    changed.clear()
    server.put(pod("c", app="ours"))
    until(lambda: names(mirror) == ["a", "c"])
    assert changed.is_set()
    server.remove("/api/v1/namespaces/n/pods/a")
    until(lambda: names(mirror) == ["c"])
    assert [item["metadata"]["name"] for item in mirror.deleted()] == ["a"]


def test_expired_resource_version_leads_to_a_new_list(server: ApiServer) -> None:
    server.put(pod("a"))
    mirror = Mirror(server.cluster, POD, lambda: None)
    mirror.refresh()
    server.put(pod("b"))
    server.remove("/api/v1/namespaces/n/pods/a")
    server.forget_history()
    mirror.start()
    until(lambda: names(mirror) == ["b"])
    assert [item["metadata"]["name"] for item in mirror.deleted()] == ["a"]


def test_resource_version_that_the_server_does_not_know_leads_to_a_new_list(server: ApiServer) -> None:
    server.put(pod("a"))
    mirror = Mirror(server.cluster, POD, lambda: None)
    mirror.refresh()
    mirror._version = "None"
    server.put(pod("b"))
    mirror.start()
    until(lambda: names(mirror) == ["a", "b"])


def test_list_without_a_resource_version_is_requested_again(server: ApiServer) -> None:
    server.put(pod("a"))
    server.versionless_lists = 2
    mirror = Mirror(server.cluster, POD, lambda: None)
    with pytest.raises(ClusterUnavailable, match="without a resource version"):
        mirror.refresh()
    mirror.start()
    until(lambda: mirror.is_synced)
    assert names(mirror) == ["a"]


def test_silent_stream_is_noticed(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SILENCE_SECONDS", 0.2)
    server.silent = True
    mirror = Mirror(server.cluster, POD, lambda: None)
    with pytest.raises(ClusterUnavailable):
        mirror.follow()
    server.put(pod("a"))
    server.silent = False
    mirror.start()
    until(lambda: names(mirror) == ["a"])


def test_object_that_was_created_here_is_known_at_once_but_not_after_its_deletion(server: ApiServer) -> None:
    mirror = Mirror(server.cluster, POD, lambda: None)
    mirror.refresh()
    created = server.put(pod("a"))
    mirror.put(created)
    assert names(mirror) == ["a"]
    server.remove("/api/v1/namespaces/n/pods/a")
    mirror.refresh()
    mirror.put(created)
    assert names(mirror) == []


def test_api_server_that_cannot_be_reached_is_an_error_and_no_empty_list(server: ApiServer) -> None:
    cluster = server.cluster
    server.http.socket.close()
    mirror = Mirror(cluster, POD, lambda: None)
    with pytest.raises(ClusterUnavailable, match="does not answer"):
        mirror.refresh()
    assert not mirror.is_synced
