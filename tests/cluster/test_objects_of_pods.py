"""Objects of pods on the real cluster: pods have no store key.

The S3 server enforces signatures.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import urllib3

from recipes.contracts.job import Job
from recipes.storage.artifact_store import Store
from tests.cluster import network
from tests.cluster.cluster import Cluster
from tests.cluster.simple_jobs import job as pods_of
from tests.cluster.simple_jobs import unique
from tests.support.server_process import ServerProcess
from tests.support.signed_store import objects_address, program_job, store_in_pod, submit

pytestmark = [pytest.mark.cluster, pytest.mark.cluster_slow]

NAMESPACE = "objects"
PUBLISH = """
import json, os, random
from pathlib import Path
from recipes.contracts.job import StoreAddress
from recipes.storage.artifact_store import Store
from recipes.storage.buckets import StoreRefuses

place, others = os.environ["PLACE"], os.environ["OTHERS"]
store = Store(StoreAddress.model_validate_json(os.environ["ADDRESS"]))
folder = Path("/dev/shm/made")
folder.mkdir()
(folder / "weights").write_bytes(random.Random(0).randbytes(20 << 20))
made = store.publish(folder, place, "merged")
refused = []
for change in (store.get_bytes, store.list, lambda uri: store.put_bytes(uri, b"x")):
    try:
        change(others)
    except StoreRefuses:
        refused.append(True)
keys = [name for name in os.environ if name.startswith("AWS")]
print(json.dumps({"digest": made.digest, "fetched": store.sha256(place + "/weights"), "refused": refused, "keys": keys}))
"""


@pytest.fixture(scope="module")
def server(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Start an API that pods reach.

    Programs sign in with their own tokens, so no sign-in server is needed.
    """
    settings = {
        "HANZO_ML_STORAGE_ENDPOINT": cluster.s3.url,
        "HANZO_ML_STORAGE_ACCESS_KEY": cluster.s3.access_key,
        "HANZO_ML_STORAGE_SECRET_KEY": cluster.s3.secret_key,
        "HANZO_ML_DATABASE_URL": cluster.postgres.create_database(unique("objects").replace("-", "_")),
        "HANZO_ML_SERVER_HOST": network.GATEWAY,
        "HANZO_ML_AUTH_VERIFY_TOKENS": "true",
        "HANZO_ML_AUTH_IAM_URL": "http://127.0.0.1:1",
    }
    with ServerProcess(tmp_path_factory.mktemp("api"), settings) as process:
        yield process


@pytest.fixture
def converted(server: ServerProcess) -> Iterator[tuple[Job, str, str, Store]]:
    """Submit a program; return it with token, output, and the store with the server's keys."""
    place = f"s3://hanzo-models/{unique('objects')}/merged"
    job = program_job(server, {"merged": place})
    direct = Store(server.settings.store, server.settings.storage.variables)
    yield job, submit(server, job), place, direct
    direct.delete(place)


def test_pod_without_keys_publishes_its_output_and_reaches_nothing_else(
    cluster: Cluster, server: ServerProcess, converted: tuple[Job, str, str, Store]
) -> None:
    job, token, place, direct = converted
    others = f"s3://hanzo-ml/checkpoints/{unique('run')}/100/model.safetensors"
    direct.put_bytes(others, b"weights of another job")
    variables = {
        "ADDRESS": store_in_pod(server, job, token).address.model_dump_json(),
        "PLACE": place,
        "OTHERS": others,
        "MLFLOW_TRACKING_TOKEN": token,
    }
    cluster.create_namespace(NAMESPACE)
    try:
        name = unique("publish")
        env = [{"name": key, "value": value} for key, value in variables.items()]
        cluster.apply(pods_of(name, NAMESPACE, ["python", "-c", PUBLISH], env=env))
        cluster.kubectl("wait", f"--namespace={NAMESPACE}", f"job/{name}", "--for=condition=Complete", "--timeout=120s")
        said = json.loads(cluster.kubectl("logs", f"--namespace={NAMESPACE}", f"job/{name}").splitlines()[-1])
    finally:
        cluster.delete_namespace(NAMESPACE)
    found = direct.find(place)
    assert found is not None
    assert said == {
        "digest": found.digest,
        "fetched": direct.sha256(f"{place}/weights"),
        "refused": [True, True, True],
        "keys": [],
    }
    assert direct.get_bytes(others) == b"weights of another job"
    direct.remove(others)


def test_store_refuses_changed_addresses_and_other_bytes(
    server: ServerProcess, converted: tuple[Job, str, str, Store]
) -> None:
    job, token, place, direct = converted
    direct.put_bytes(f"{place}/a", b"a")
    direct.put_bytes(f"{place}/b", b"b")
    sha256 = direct.sha256(f"{place}/a")
    body = {"reads": [f"{place}/a"], "writes": [{"uri": f"{place}/new", "sha256": sha256}]}
    headers = {"Authorization": f"Bearer {token}"}
    answer = httpx.post(f"{objects_address(server, job)}/addresses", json=body, headers=headers).json()
    read, write = answer["reads"][0], answer["writes"][0]
    assert urllib3.request("GET", read["url"]).data == b"a"
    assert urllib3.request("GET", read["url"].replace("/a?", "/b?")).status == 403
    assert urllib3.request("PUT", write["url"], body=b"z", headers=write["headers"]).status == 400
    assert urllib3.request("PUT", write["url"], body=b"a").status == 403, "the checksum is signed"
    assert not direct.exists(f"{place}/new")
    assert urllib3.request("PUT", write["url"], body=b"a", headers=write["headers"]).status == 200
    assert direct.get_bytes(f"{place}/new") == b"a"


def test_expired_address_is_refused_by_the_store(converted: tuple[Job, str, str, Store], tmp_path: Path) -> None:
    _, _, place, direct = converted
    direct.put_bytes(f"{place}/a", b"a")
    address = direct.signed_url(f"{place}/a", 1)
    assert address is not None
    deadline = time.monotonic() + 30
    while (answer := urllib3.request("GET", address)).status == 200:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert answer.status == 403
