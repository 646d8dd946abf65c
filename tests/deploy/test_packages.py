"""Both packages as users install them: wheels in otherwise empty environments."""

import hashlib
import json
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from recipes.contracts.job import EXIT_BAD_CONFIGURATION, Job, Program, StoreAddress
from tests.end_to_end.local_stack import LocalStack, wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements.lock"
SOURCES = ("api", "deploy", "hanzo_ml", "hanzo_ml_assets", "recipes", "resources", "sensors")
FILES = ("dagster.yaml", "pyproject.toml", "requirements.lock", "workspace.yaml")
PIP = (sys.executable, "-m", "pip")
CLIENT_MEGABYTES = 150
CONTROL_PLANE_MEGABYTES = 1000
"""CUDA alone takes several times as much."""
LOG_A_RUN = """
import importlib.metadata, importlib.util, sys
import hanzo_ml

assert importlib.metadata.version("hanzo-ml-client") == "1.0.0"
assert not any(importlib.util.find_spec(name) for name in ("torch", "dagster", "sqlalchemy", "resources"))
hanzo_ml.set_tracking_uri(sys.argv[1])
hanzo_ml.set_experiment("zen-72b-finance")
with hanzo_ml.start_run(run_name="qlora") as run:
    run.log_params({"lora_rank": 64})
    run.log_metrics({"train/loss": 0.42}, step=100)
    run.log_artifact("notes.txt", sys.argv[2])
print(run.id)
"""
READ_ENVIRONMENT = """
from resources.installation import SOURCE
from resources.lineage.run_record import read_environment
print(read_environment(SOURCE).model_dump_json())
"""
SUBMIT_TRAINING = """
from pathlib import Path
from resources.compute.local.backend import LocalCompute
from resources.installation import SOURCE
from recipes.contracts.job import Job
LocalCompute(Path("jobs"), source=SOURCE).submit(Job.model_validate_json(Path("train.json").read_bytes()))
"""
RUN_PREPARATION = """
from recipes.runner import main

def program(job, store, work):
    import transformers

main(program)
"""
START_MODEL = """
import asyncio
from pathlib import Path
from resources.serving.llama_process import Backend
asyncio.run(Backend.start("support", Path("support.gguf")))
"""


@dataclass(frozen=True)
class Wheels:
    client: Path
    control_plane: Path
    commit: str
    """Commit of the repository that they were built from."""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Wheels:
    """Build both from a copy, because a build writes into its source folder."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheels")
    for name in SOURCES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, source)
    author = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    for words in (("init", "-q"), ("add", "."), (*author, "commit", "-qm", "as it is")):
        subprocess.run(["git", "-C", source, *words], check=True)
    commit = subprocess.run(["git", "-C", source, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    command = [*PIP, "wheel", "--quiet", "--no-deps", "--wheel-dir", target, source, source / "deploy" / "client"]
    subprocess.run(command, check=True, stdout=sys.stderr)
    [client], [control_plane] = target.glob("hanzo_ml_client-*.whl"), target.glob("hanzo_ml-*.whl")
    return Wheels(client, control_plane, commit.strip())


def install(folder: Path, wheel: Path, *options: str) -> str:
    """Create an environment with the wheel and its locked requirements; return its interpreter."""
    venv.create(folder)
    python = str(folder / "bin" / "python")
    command = [*PIP, "--python", python, "install", "--quiet", "--constraint", str(LOCK), *options, str(wheel)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return python


def megabytes(folder: Path) -> float:
    return sum(file.lstat().st_size for file in folder.rglob("*")) / 1e6


@dataclass
class InstalledStack(LocalStack):
    """A stack of an installed package, used in a folder without a checkout."""

    python: str = sys.executable

    @property
    def environment(self) -> dict[str, str]:
        return {key: value for key, value in super().environment.items() if key != "PYTHONPATH"}

    def hanzo_ml(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = self.run("-m", "hanzo_ml", *arguments)
        assert not check or done.returncode == 0, f"hanzo-ml {' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command, folder = [self.python, *arguments], self.home.parent
        return subprocess.run(command, cwd=folder, env=self.environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def stack(wheels: Wheels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InstalledStack]:
    """Yield the control plane, installed from its wheel.

    It runs in a user's repository, whose commit is not the product's.
    """
    folder = tmp_path_factory.mktemp("control-plane")
    subprocess.run(["git", "init", "-q", folder], check=True)
    python = install(folder / "venv", wheels.control_plane, "--no-compile")
    found = InstalledStack(folder / "state", python=python)
    found.home.mkdir()
    try:
        found.hanzo_ml("up")
        yield found
    finally:
        found.hanzo_ml("down", check=False)


@pytest.mark.requirement("T3")
def test_client_is_small_and_logs_a_run(wheels: Wheels, stack: InstalledStack, tmp_path: Path) -> None:
    python = install(tmp_path / "venv", wheels.client)
    assert megabytes(tmp_path / "venv") < CLIENT_MEGABYTES
    notes = tmp_path / "notes.txt"
    notes.write_text("as expected")
    script = [python, "-I", "-c", LOG_A_RUN, stack.url("HANZO_ML_SERVER_PORT"), str(notes)]
    run_id = subprocess.run(script, check=True, stdout=subprocess.PIPE, text=True, cwd=tmp_path).stdout.split()[-1]
    run = stack.get(f"/v1/runs/{run_id}")
    assert stack.get(f"/v1/experiments/{run['experiment_id']}")["name"] == "zen-72b-finance"
    assert (run["status"], run["params"]) == ("completed", {"lora_rank": "64"})
    assert [artifact["key"] for artifact in run["artifacts"]] == ["notes.txt"]


@pytest.mark.requirement("G8")
def test_control_plane_is_small_and_knows_its_commit_and_lock(wheels: Wheels, stack: InstalledStack) -> None:
    assert megabytes(Path(stack.python).parents[1]) < CONTROL_PLANE_MEGABYTES
    assert not list(Path(stack.python).parents[1].glob("lib/*/site-packages/torch"))
    done = stack.run("-c", READ_ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["git_commit"] == wheels.commit and not found["git_dirty"]
    assert found["lock_sha256"] == hashlib.sha256(LOCK.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("module", "refusal"),
    [
        ("resources.outbox_relay", "set stream.brokers"),
        ("resources.compute.kubernetes.controller", "set scheduler.kubeconfig"),
    ],
)
def test_programs_outside_the_local_stack_load_without_torch(stack: InstalledStack, module: str, refusal: str) -> None:
    """`hanzo-ml up` has started all others.

    These exit at the first requirement that is missing here.
    """
    done = stack.run("-m", module)
    assert done.returncode == EXIT_BAD_CONFIGURATION and refusal in done.stderr


def test_control_plane_checks_and_splits_a_dataset_without_torch(stack: InstalledStack) -> None:
    """Jobs of the installed programs run through Dagster and the local backend."""
    records = [json.dumps({"text": f"The answer to question {number} is {number * 7}."}) for number in range(60)]
    (stack.home.parent / "answers.jsonl").write_text("\n".join(records))
    stack.hanzo_ml("dataset", "create", "--name", "answers", "--path", "answers.jsonl", "--format", "jsonl")

    def version() -> dict[str, object] | None:
        found = json.loads(stack.hanzo_ml("dataset", "show", "answers@1").stdout)
        return found if found["splits"] else None

    wait_until("the splits of answers@1", version, every=1)


def job_of(program: Program, folder: Path) -> Job:
    return Job(
        id="r",
        program=program,
        result_uri="s3://hanzo-ml/runs/r/result.json",
        store=StoreAddress(root=(folder / "objects").as_uri(), buckets={"checkpoints": "hanzo-ml-checkpoints"}),
        work_dir=str(folder / "work"),
        cache_dir=str(folder / "cache"),
    )


def test_job_that_lacks_an_extra_is_refused_with_its_name(stack: InstalledStack) -> None:
    training = stack.hanzo_ml("job", "submit", "--model", "ellarin_assistant", check=False)
    assert training.returncode and "pip install 'hanzo-ml[train]'" in training.stderr
    for program in (Program.TRAIN, Program.PREPARE):
        (stack.home.parent / f"{program}.json").write_text(job_of(program, stack.home / "tried").model_dump_json())
    tried = stack.hanzo_ml("recipe", "check", "smollm2-135m-lora", check=False)
    assert tried.returncode and "pip install 'hanzo-ml[train]'" in tried.stderr
    started = stack.run("-c", SUBMIT_TRAINING)
    assert started.returncode and "BadConfiguration: the program train needs torch" in started.stderr
    prepared = stack.run("-c", RUN_PREPARATION, "prepare.json")
    assert prepared.returncode == EXIT_BAD_CONFIGURATION and "pip install 'hanzo-ml[train]'" in prepared.stderr
    served = stack.run("-c", START_MODEL)
    assert served.returncode and "pip install 'hanzo-ml[serve]'" in served.stderr


def test_lock_satisfies_every_extra(wheels: Wheels) -> None:
    """With the lock installed, no extra changes a package.

    Those of `scripts` add what the lock pins.
    """
    everything = f"hanzo-ml[train,serve,ui,deepspeed,scripts,dev] @ {wheels.control_plane.as_uri()}"
    command = [*PIP, "install", "--dry-run", "--quiet", "--report", "-", "--constraint", str(LOCK), everything]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd="/").stdout)
    found = {package["metadata"]["name"]: package["metadata"]["version"] for package in report["install"]}
    assert found.keys() <= {"hanzo-ml", "datasets", "dill", "multiprocess"}
    pins = LOCK.read_text().splitlines()
    assert all(f"{name}=={version}" in pins for name, version in found.items() if name != "hanzo-ml")
