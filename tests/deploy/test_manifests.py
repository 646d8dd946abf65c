"""deploy/: an image that holds the product, and serves it."""

import tomllib
from pathlib import Path

import pytest

from api.server import refuse_open_network
from resources.compute.kubernetes.pod_manifest import USER_ID
from resources.installation import COMMIT_FILE
from resources.settings.settings import Settings

ROOT = Path(__file__).resolve().parents[2]


def test_the_image_holds_every_package_and_the_locked_libraries_and_runs_as_our_user() -> None:
    lines = (ROOT / "deploy" / "Containerfile").read_text().splitlines()
    copied = {word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]}
    assert all((ROOT / name).exists() for name in copied)
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    names = {package.removesuffix("*") for package in packages}
    assert names <= copied
    # Its file system is read-only: what is not compiled in it is compiled by every process.
    [compiled] = (line for line in lines if "compileall" in line)
    assert names <= set(compiled.split())
    assert {"requirements.lock", "pyproject.toml", "dagster.yaml", "workspace.yaml"} <= copied
    assert f'RUN echo "$GIT_COMMIT" > {COMMIT_FILE}' in lines, "what runs and proofs say of the code"
    [installed] = (line for line in lines if "apt-get install" in line)
    assert "gcc" in installed.split(), "what compiles the blocks of a model for a GPU"
    assert f"USER {USER_ID}:{USER_ID}" in lines and 'ENTRYPOINT ["hanzo-ml"]' in lines


@pytest.mark.parametrize("file", ["Makefile", "deploy/Containerfile"])
def test_every_install_is_constrained_by_the_lock(file: str) -> None:
    commands = (ROOT / file).read_text().replace("\\\n", " ").splitlines()
    installs = [command for command in commands if "pip install" in command and not command.lstrip().startswith("#")]
    assert installs
    assert all("--constraint requirements.lock" in command or "--no-deps" in command for command in installs)


def test_the_image_by_itself_serves_the_api_to_a_network_and_asks_for_tokens() -> None:
    """Row U1: `docker run` names the database, the object store and the brokers, and no more."""
    lines = (ROOT / "deploy" / "Containerfile").read_text().splitlines()
    assert 'CMD ["server", "run"]' in lines and "COPY deploy/image.yaml /etc/hanzo-ml/config.yaml" in lines
    given = {
        "HANZO_ML_DATABASE_URL": "postgresql://u:p@host/ml",
        "HANZO_ML_STORAGE_ENDPOINT": "http://storage:9000",
        "HANZO_ML_STREAM_BROKERS": "kafka:9092",
    }
    settings = Settings.load({**given, "HANZO_ML_CONFIG": str(ROOT / "deploy" / "image.yaml")})
    refuse_open_network(settings)
    assert settings.server.host == "0.0.0.0" and settings.auth.verify_tokens
