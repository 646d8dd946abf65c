"""deploy/images: what the Containerfiles install and copy, and how the images run."""

import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest

from api.server import refuse_open_network
from resources.compute.kubernetes.pod_manifest import USER_ID
from resources.installation import COMMIT_FILE, LOCK_FILE
from resources.settings.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "deploy" / "images"
NAMES = ("control-plane", "training", "engine")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = {name.removesuffix("*") for name in PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}


def read_instructions(name: str) -> list[tuple[str, str]]:
    """Return the instructions of an image, one line each."""
    text = re.sub(r"\\\n\s*", "", (IMAGES / name / "Containerfile").read_text())
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def values(name: str, instruction: str) -> list[str]:
    return [rest for word, rest in read_instructions(name) if word == instruction]


def copied(name: str) -> set[str]:
    return {source for rest in values(name, "COPY") for source in rest.split()[:-1]}


@pytest.mark.parametrize("name", ["control-plane", "training"])
def test_image_contains_compiled_packages_stack_files_and_the_commit(name: str) -> None:
    assert all((ROOT / path).exists() for path in copied(name))
    assert {*PACKAGES, LOCK_FILE, "pyproject.toml", "dagster.yaml", "workspace.yaml"} <= copied(name)
    [compiled] = (rest for rest in values(name, "RUN") if "compileall" in rest)
    assert set(compiled.split()) >= PACKAGES, "its file system is read-only: each process would compile what is not"
    assert any(f'echo "$GIT_COMMIT" > {COMMIT_FILE}' in rest for rest in values(name, "RUN"))


@pytest.mark.parametrize("name", NAMES)
def test_image_has_a_replaceable_base_and_runs_as_the_fixed_user(name: str) -> None:
    first, second = read_instructions(name)[0], next(each for each in read_instructions(name) if each[0] == "FROM")
    assert first[0] == "ARG" and re.fullmatch(r"BASE_IMAGE=docker\.io/[\w./-]+:[\w.-]+(@sha256:[0-9a-f]{64})?", first[1])
    assert second[1].split()[0] == "${BASE_IMAGE}"
    assert values(name, "USER")[-1] == f"{USER_ID}:{USER_ID}"
    labels = set(re.findall(r"(org\.opencontainers\.image\.\w+)=", "".join(values(name, "LABEL"))))
    assert {"org.opencontainers.image.title", "org.opencontainers.image.description"} <= labels


@pytest.mark.parametrize("name", NAMES)
def test_dependencies_are_a_layer_before_the_code(name: str) -> None:
    steps = read_instructions(name)
    installs = [number for number, (word, rest) in enumerate(steps) if word == "RUN" and "pip install" in rest]
    code = [number for number, (word, rest) in enumerate(steps) if word == "COPY" and PACKAGES & set(rest.split())]
    assert installs and max(installs) < min(code, default=len(steps))
    assert all("--mount=type=secret,id=pip" in steps[number][1] for number in installs), "a mirror's password stays out"


@pytest.mark.requirement("G8")
@pytest.mark.parametrize("file", ["Makefile", *(f"deploy/images/{name}/Containerfile" for name in NAMES)])
def test_every_install_is_constrained_by_the_lock(file: str) -> None:
    text = re.sub(r"\\\n\s*", "", (ROOT / file).read_text())
    lines = [line for line in text.splitlines() if "pip install" in line and not line.lstrip().startswith("#")]
    installs = [command for line in lines for command in line.split("&&") if "pip install" in command]
    assert installs and all("--constraint requirements.lock" in command for command in installs)


def test_engine_has_the_packages_of_its_extra() -> None:
    [install] = (rest for rest in values("engine", "RUN") if "pip install" in rest)
    extra = PYPROJECT["project"]["optional-dependencies"]["serve"]
    assert install.endswith(" ".join(["requirements.lock", *extra]))


@pytest.mark.requirement("G4", "U5")
def test_training_image_has_the_packages_of_training_and_its_scripts() -> None:
    """Torch, transformers, datasets, accelerate, peft, bitsandbytes, deepspeed, and the product's client."""
    [install] = (rest for rest in values("training", "RUN") if "pip install" in rest)
    [extras] = re.findall(r"'\.\[([\w,]+)\]'", install)
    installed = {
        re.split(r"[=<>]", requirement)[0]
        for extra in extras.split(",")
        for requirement in PYPROJECT["project"]["optional-dependencies"][extra]
    }
    assert {"torch", "transformers", "datasets", "accelerate", "peft", "bitsandbytes", "deepspeed"} <= installed
    assert "hanzo_ml" in copied("training")
    assert "HANZO_ML_TRACKING_URI=http://ml.hanzo.svc:8057" in " ".join(values("training", "ENV"))
    [apt] = (rest for rest in values("training", "RUN") if "apt-get install" in rest)
    assert "gcc" in apt.split(), "compiles the blocks of a model for the GPU"


@pytest.mark.requirement("U6", "Z18")
def test_training_image_s_tag_names_torch_and_cuda_of_lock_and_base() -> None:
    """`make pin-images` and the manifests use this name."""
    text = (IMAGES / "training" / "Containerfile").read_text()
    [(torch, cuda)] = set(re.findall(r"hanzoai/ml-pytorch:([\d.]+)-cuda([\d.]+)", text))
    [locked] = re.findall(r"^torch==([\d.]+)$", (ROOT / LOCK_FILE).read_text(), re.MULTILINE)
    [base] = re.findall(r"^ARG BASE_IMAGE=docker\.io/nvidia/cuda:([\d.]+)-", text, re.MULTILINE)
    built_with = distribution("torch").locate_file("torch/version.py").read_text()
    assert locked.startswith(f"{torch}.") and base.startswith(f"{cuda}.")
    assert f"cuda: Optional[str] = '{cuda}'" in built_with


@pytest.mark.requirement("U1")
def test_control_plane_image_by_itself_serves_the_api_to_a_network_and_asks_for_tokens() -> None:
    """`docker run` sets only the database, the object store and the brokers."""
    assert values("control-plane", "CMD") == ['["hanzo-ml", "server", "run"]']
    assert not values("control-plane", "ENTRYPOINT"), "dagster-k8s gives the pods of runs arguments, which would follow it"
    assert "deploy/images/control-plane/config.yaml /etc/hanzo-ml/config.yaml" in values("control-plane", "COPY")
    given = {
        "HANZO_ML_DATABASE_URL": "postgresql://u:p@host/ml",
        "HANZO_ML_STORAGE_ENDPOINT": "http://storage:9000",
        "HANZO_ML_STREAM_BROKERS": "kafka:9092",
    }
    settings = Settings.load({**given, "HANZO_ML_CONFIG": str(IMAGES / "control-plane" / "config.yaml")})
    refuse_open_network(settings)
    assert settings.server.host == "0.0.0.0" and settings.auth.verify_tokens
