"""A session with the installed MLflow client, and on demand with any other release.

python -m venv /tmp/client && /tmp/client/bin/pip install mlflow-skinny==2.22.2
MLFLOW_CLIENT_PYTHON=/tmp/client/bin/python pytest tests/api/routes/mlflow/test_client_versions.py
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.api import client_session
from tests.support.server_process import ServerProcess

INTERPRETER = os.environ.get("MLFLOW_CLIENT_PYTHON", sys.executable)


@pytest.mark.requirement("F8", "Z31")
@pytest.mark.slow
def test_whole_session_with_the_mlflow_client_succeeds(server: ServerProcess, tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "PYTHON"))}
    command = [INTERPRETER, client_session.__file__, server.url]
    done = subprocess.run(command, cwd=tmp_path, env=kept, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith("did everything")
