"""Training in two processes, as LocalCompute starts them: the numbers of one process, bit-exact over kills, and with one
process in between without a row lost or seen twice.
"""

import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from recipes.results import TrainingFacts
from recipes.schema import Distributed, Job, Result, Tracking
from resources.compute.base import Follower
from resources.compute.local import LocalCompute
from resources.detached import read_pid
from tests.api.server_process import ServerProcess
from tests.recipes.training.place import Place

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
LONG = 240.0
FULL = {"method": "full", "dtype": "float32", "learning_rate": 1e-3}
MIXED = FULL | {"dtype": "bfloat16"}
STRATEGIES: list[tuple[str, dict[str, Any], float]] = [
    ("ddp", {}, 1e-4),
    ("fsdp", {}, 1e-4),
    ("fsdp", FULL, 1e-4),
    ("fsdp", MIXED, 1e-2),  # one process rounds in other places, where the processor computes in bfloat16
    ("deepspeed_zero2", FULL, 1e-4),
    ("deepspeed_zero2", MIXED, 1e-2),
    ("deepspeed_zero3", {}, 1e-4),
    ("deepspeed_zero3", FULL, 1e-4),
    ("fsdp", FULL | {"objective": "dpo"}, 1e-4),
    ("deepspeed_zero2", FULL | {"objective": "dpo"}, 1e-4),
    ("deepspeed_zero3", FULL | {"objective": "dpo"}, 1e-4),
    ("deepspeed_zero3", {"objective": "dpo"}, 1e-4),
    ("deepspeed_zero2", {"objective": "orpo"}, 1e-4),
    ("deepspeed_zero3", FULL | {"objective": "orpo"}, 1e-4),
]
"""With how far their losses may be from those of one process, relative to them."""
RECORDING = """
import hashlib
from recipes.training.objectives.sft import Sft

class Recording(Sft):
    "Writes down each row that the model learns from, into the file that the recipe's description names."

    def loss(self, model, batch):
        if model.training:
            with open(self.recipe.description, "a") as file:
                for row in batch["input_ids"]:
                    file.write(hashlib.sha256(row.numpy().tobytes()).hexdigest() + "\\n")
        return None
"""
SLOW = """
import time
from recipes.runner import say
from recipes.training.objectives.sft import Sft

class Slow(Sft):
    "Takes so long to evaluate that there is time to be killed."

    def loss(self, model, batch):
        if not model.training:
            say("evaluating")
            time.sleep(0.5)
        return None
"""
"""Objectives that are installed beside the product, as any other may be."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server")) as process:
        yield process


class Runs:
    """Training runs by LocalCompute that log to a real server; a name that was used before goes on with that run."""

    def __init__(self, place: Place, server: ServerProcess, folder: Path) -> None:
        self.place = place
        self.server = server
        self.folder = folder
        self.compute = LocalCompute(source=ROOT, poll_seconds=0.02)
        self._run_ids: dict[str, str] = {}

    def run_id(self, name: str) -> str:
        if name not in self._run_ids:
            answer = httpx.post(f"{self.server.url}/api/2.0/mlflow/runs/create", json={"experiment_id": "0"})
            self._run_ids[name] = answer.json()["run"]["info"]["run_id"]
        return self._run_ids[name]

    def job(self, name: str, **changed: Any) -> Job:
        job = self.place.job(self.folder / name, changed)
        recipe = self.place.recipe.changed(changed)
        tracking = Tracking(uri=self.server.url, run_id=self.run_id(name))
        return job.model_copy(update={"tracking": tracking, "distributed": recipe.distributed})

    def train(self, job: Job, on_line: Callable[[str], None] = lambda line: None) -> Result:
        lines: list[str] = []

        def line(text: str) -> None:
            lines.append(text)
            on_line(text)

        try:
            return self.compute.run(job, Follower(line=line, phase=lambda observation: None))
        except Exception as error:
            raise AssertionError("\n".join(lines)) from error

    def losses(self, name: str, key: str = "train/loss") -> list[tuple[int, float]]:
        """As the server has them."""
        query = {"run_id": self.run_id(name), "metric_key": key}
        answer = httpx.get(f"{self.server.url}/api/2.0/mlflow/metrics/get-history", params=query).json()
        return [(point["step"], point["value"]) for point in answer["metrics"]]


@pytest.fixture(scope="module")
def runs(place: Place, server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(place, server, tmp_path_factory.mktemp("processes"))


def shape(strategy: str, processes: int) -> dict[str, Any]:
    return {"strategy": strategy, "gpus_per_node": processes, "backend": "gloo"}


def losses_of(result: Result) -> dict[int, float]:
    return {step: loss or 0.0 for step, loss in TrainingFacts.model_validate(result.facts).losses.items()}


def children(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]


@pytest.mark.parametrize(("strategy", "method", "tolerance"), STRATEGIES)
def test_two_processes_compute_what_one_does_on_the_same_rows(
    runs: Runs, strategy: str, method: dict[str, Any], tolerance: float
) -> None:
    name = f"{strategy}-{method.get('dtype', 'adapter')}-{method.get('objective', 'sft')}"
    one = runs.train(runs.job(f"{name}-one", batch_size=4, **method))
    two = runs.train(runs.job(f"{name}-two", batch_size=2, distributed=shape(strategy, 2), **method))
    assert losses_of(two) == pytest.approx(losses_of(one), rel=tolerance)
    assert runs.losses(f"{name}-two") == list(losses_of(two).items())
    validation = [dict(runs.losses(f"{name}-{which}", "eval/loss")) for which in ("one", "two")]
    assert set(validation[0]) == {2, 4, 6, 8} and validation[1] == pytest.approx(validation[0], rel=tolerance)


@pytest.mark.parametrize(
    ("strategy", "method"),
    [
        ("ddp", {"lora_dropout": 0.1}),
        ("fsdp", FULL),
        ("deepspeed_zero2", FULL),
        ("deepspeed_zero3", MIXED),
        ("fsdp", FULL | {"objective": "dpo"}),
        ("deepspeed_zero3", FULL | {"objective": "dpo"}),
    ],
)
def test_whichever_process_is_killed_the_run_ends_as_if_nobody_had(
    runs: Runs, strategy: str, method: dict[str, Any]
) -> None:
    name = f"{strategy}-{method.get('objective', 'sft')}"
    settings: dict[str, Any] = {"batch_size": 2, "max_steps": 20, "distributed": shape(strategy, 2), **method}
    whole = runs.train(runs.job(f"{name}-whole", **settings))
    due = [random.randrange(first, first + 4) for first in (1, 7, 13)]
    victims: list[Callable[[int], int]] = [lambda pid: pid, lambda pid: children(pid)[0], lambda pid: children(pid)[1]]
    random.shuffle(victims)
    job = runs.job(f"{name}-killed", **settings)
    killed: dict[int, int] = {}

    def kill(line: str) -> None:
        """At the first step that is due of each start; what a start had still printed by then is passed over."""
        pid = read_pid(Path(job.work_dir))
        if due and pid and pid not in killed and step_of(line) >= due[0]:
            os.kill(victims.pop()(pid), signal.SIGKILL)
            killed[pid] = due.pop(0)

    result = runs.train(job, kill)
    assert len(killed) == 3, killed
    assert {role: made.digest for role, made in result.artifacts.items()} == {
        role: made.digest for role, made in whole.artifacts.items()
    }, killed
    assert losses_of(result) == losses_of(whole)
    assert runs.losses(f"{name}-killed") == list(losses_of(whole).items())


@pytest.mark.parametrize(
    ("strategy", "method"),
    [("ddp", {}), ("fsdp", FULL), ("deepspeed_zero2", FULL), ("deepspeed_zero3", FULL)],
)
def test_a_run_goes_on_with_one_process_and_with_two_again(
    runs: Runs, strategy: str, method: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal within the rounding of sums whose order differs; the rows are the same, each as often."""
    install("recording", RECORDING, tmp_path, monkeypatch)
    settings: dict[str, Any] = {"batch_size": 2, "max_steps": 24, "objective": "recording", **method}
    settings["distributed"] = shape(strategy, 2)
    whole = runs.train(runs.job(f"{strategy}-undisturbed", description=str(tmp_path / "undisturbed"), **settings))

    job = runs.job(f"{strategy}-elastic", description=str(tmp_path / "elastic"), **settings)
    alone = job.model_copy(update={"distributed": Distributed.model_validate(shape(strategy, 1))})
    offset = 0
    for there, until in ((job, 2), (alone, 8)):
        runs.compute.submit(there)
        offset = wait_for_step(runs.compute, there, until, offset)
        runs.compute.cancel(there)
    result = runs.train(job)
    assert 8 <= (TrainingFacts.model_validate(result.facts).resumed_from or 0) < 24
    assert losses_of(result) == pytest.approx(losses_of(whole), rel=1e-4)
    consumed = {name: Counter((tmp_path / name).read_text().split()) for name in ("undisturbed", "elastic")}
    assert consumed["elastic"] == consumed["undisturbed"]
    assert sum(consumed["elastic"].values()) == 24 * 4


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed_zero3"])
def test_an_evaluation_is_broken_off_by_all_and_repeated_by_whoever_resumes(
    runs: Runs, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in one, killed where it is repeated: every loss is there once, and is that of a run that nobody stopped."""
    install("slow", SLOW, tmp_path, monkeypatch)
    settings: dict[str, Any] = {**FULL, "objective": "slow", "max_steps": 6, "distributed": shape(strategy, 2)}
    settings |= {"batch_size": 1, "gradient_accumulation": 2, "eval_steps": 3}
    settings["checkpoint"] = {"interval": "1h", "interval_steps": 100}
    whole = runs.train(runs.job(f"{strategy}-evaluated", **settings))
    job = runs.job(f"{strategy}-evaluation-stopped", **settings)
    runs.compute.submit(job)
    wait_for_line(runs.compute, job, lambda line: "evaluating" in line)
    runs.compute.cancel(job)
    said, _ = runs.compute.log(job, 0)
    assert "asked to stop: the evaluation is broken off" in said and "eval loss" not in said, said
    # Killed while it repeats the evaluation, then when the server has that, and no checkpoint has it.
    due = ["resuming from checkpoint 3", "evaluating", "step 3/6 eval loss", "step 6/6 loss", "evaluating", "checkpoint 3"]

    def kill(line: str) -> None:
        pid = read_pid(Path(job.work_dir))
        if due and due[0] in line and pid and due.pop(0) == "evaluating":
            os.kill(children(pid)[1], signal.SIGKILL)

    result = runs.train(job, kill)
    assert not due
    assert {role: made.digest for role, made in result.artifacts.items()} == {
        role: made.digest for role, made in whole.artifacts.items()
    }
    assert losses_of(result) == losses_of(whole)
    for key in ("train/loss", "eval/loss"):
        assert runs.losses(f"{strategy}-evaluation-stopped", key) == runs.losses(f"{strategy}-evaluated", key)


def test_a_run_begins_with_the_weights_of_another_where_each_process_holds_a_part_of_them(runs: Runs) -> None:
    settings: dict[str, Any] = {**FULL, "batch_size": 2, "max_steps": 1}
    start = runs.train(runs.job("zero3-start", **settings)).artifacts["weights"]
    still = settings | {"learning_rate": 1e-30, "distributed": shape("deepspeed_zero3", 2)}
    job = runs.job("zero3-started", **still)
    made = runs.train(job.model_copy(update={"inputs": {**job.inputs, "start": start}})).artifacts["weights"]
    folders = [runs.place.store.fetch(weights, runs.folder / "cache") for weights in (start, made)]
    first, second = (folder.joinpath("model.safetensors").read_bytes() for folder in folders)
    assert first == second


def step_of(line: str) -> int:
    """The step of a line of progress, 0 of any other."""
    found = re.search(r" step (\d+)/\d+ loss ", line)
    return int(found[1]) if found else 0


def wait_for_step(compute: LocalCompute, job: Job, step: int, offset: int) -> int:
    """Until the log beyond `offset` says that the step is done. Returns the offset to go on from."""
    return wait_for_line(compute, job, lambda line: step_of(line) >= step, offset)


def wait_for_line(compute: LocalCompute, job: Job, awaited: Callable[[str], bool], offset: int = 0) -> int:
    end = time.monotonic() + LONG
    seen = [""]
    while not any(map(awaited, seen)):
        assert time.monotonic() < end, seen
        text, offset = compute.log(job, offset)
        seen += text.splitlines()
        time.sleep(0.02)
    return offset


def install(name: str, source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an objective: the class of that name in the source of a module."""
    (folder / f"{name}.py").write_text(source)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[hanzo_ml.objectives]\n{name} = {name}:{name.capitalize()}\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
