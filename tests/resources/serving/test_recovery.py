"""Recovery of deployments: refused with the reason instead of loading forever."""

import asyncio
import sys
from pathlib import Path

import httpx
import pytest

from recipes.storage.artifact_store import hash_file
from resources.errors import BadRequest, EngineError
from resources.serving import llama_process
from resources.serving.client import DeployRequest, Served
from resources.serving.deployment_table import DeploymentState, DeploymentTable
from resources.serving.llama_process import Backend


@pytest.fixture
def asked(tmp_path: Path) -> DeployRequest:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    return DeployRequest(name="keeper", version=1, path=path, sha256=hash_file(path))


async def restored(request: DeployRequest, folder: Path) -> Served:
    """Return a deployment's state after a restart of the gateway."""
    async with httpx.AsyncClient() as http:
        table = DeploymentTable(DeploymentState(folder), http)
        table.restore((request,))
        with pytest.raises(EngineError):
            await table.route("keeper")
        (served,) = table.served()
        await table.close()
    return served


def test_restore_is_refused_when_no_process_can_be_started(
    asked: DeployRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    monkeypatch.setattr("resources.serving.deployment_table.RECOVERY_PAUSES_SECONDS", ())
    monkeypatch.setattr("resources.serving.deployment_table.LOAD_WAIT_SECONDS", 5)
    served = asyncio.run(restored(asked, tmp_path / "state"))
    assert served.status == "refused" and "no process could be started" in str(served.reason)


class Loading:
    """A backend whose model file is deleted while it loads."""

    def __init__(self, path: Path) -> None:
        path.unlink()

    async def end(self) -> None:
        pass


def test_file_deleted_while_loading_is_named(asked: DeployRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(name: str, path: Path) -> Loading:
        return Loading(path)

    monkeypatch.setattr(Backend, "start", start)

    async def load() -> None:
        async with httpx.AsyncClient() as http:
            await llama_process.load_model(asked, http)

    with pytest.raises(BadRequest, match=r"cannot read .*model\.gguf"):
        asyncio.run(load())
