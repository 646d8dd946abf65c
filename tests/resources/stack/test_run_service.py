"""One service of the stack as a container's main process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from recipes.contracts.job import EXIT_BAD_CONFIGURATION
from resources.stack import run_service
from tests.deploy.kustomization import KUBERNETES


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name in [name for name in os.environ if name.startswith(("HANZO_ML_", "DAGSTER_"))]:
        monkeypatch.delenv(name)
    config = yaml.safe_load((KUBERNETES / "base" / "config.yaml").read_text())
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"dagster": config["dagster"], "scheduler": config["scheduler"]}))
    own = {"HANZO_ML_HOME": str(tmp_path / "state"), "HANZO_ML_CONFIG": str(tmp_path / "config.yaml")}
    return {**os.environ, **own}


def test_code_server_of_a_pod_is_reachable_at_the_address_in_the_environment(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """The command is replaced by one that prints its arguments."""
    code = (
        "import json, os, runpy, sys; import resources.stack.run_service as m\n"
        "m.os.execve = lambda file, words, env: print(json.dumps([words, env, os.getcwd()]))\n"
        "m.main(['code-server'])"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    command, variables, folder = json.loads(done.stdout)
    assert command[command.index("-h") + 1] == "0.0.0.0" and "hanzo_ml_assets.definitions" in command
    assert variables["DAGSTER_CODE_SERVER_HOST"] == "code-server.hanzo.svc"
    assert variables["DAGSTER_HOME"] == str(tmp_path / "state" / "dagster") and Path(folder, "workspace.yaml").is_file()


@pytest.mark.parametrize(("words", "said"), [(["nothing"], "no service 'nothing'"), ([], "usage:"), (["relay"], "'relay'")])
def test_unknown_service_is_refused_in_one_line(environment: dict[str, str], words: list[str], said: str) -> None:
    """The relay is refused as well when there are no brokers."""
    command = [sys.executable, "-m", run_service.__name__, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == EXIT_BAD_CONFIGURATION and said in done.stderr and len(done.stderr.splitlines()) == 1
