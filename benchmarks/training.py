"""Compare LoRA or QLoRA training of the same records with several tools.

Usage: python benchmarks/training.py [--shape small|7b|7b-4096 ...] [--method lora|qlora ...] [--records 600]
                                        [--cache FOLDER] [--only NAME ...]

Prints for each tool that installs: useful tokens (no padding) per processor-second, or on a GPU per second and with MFU; the
share of time that checkpoints stalled training; peak memory. Processor-seconds are comparable even on a machine that does
other work too.
"""

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlparse

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script finds only modules in its own folder

from benchmarks.tracking.servers import Place, Server, free_port
from benchmarks.trainers.hanzo_job import make_job, new_run
from benchmarks.trainers.model_shapes import METHODS, SHAPES, Work
from benchmarks.trainers.peers import PEERS, VARIANTS, DoesNotRun, last_line, peer_program, peer_python
from benchmarks.trainers.workload import make_work
from recipes.contracts.job import Job
from recipes.contracts.recipe import Recipe
from recipes.machine import read_machine
from recipes.planning.architecture import Architecture
from recipes.planning.gpus import find_device_peak
from recipes.planning.throughput import estimate_flops_per_token
from resources.settings.settings import Settings

REPOSITORY = Path(__file__).parents[1]
MEASURED = "benchmarks.trainers.trainer_cost"
OURS, FLOOR = "ours", "hand loop"
NAMES = [FLOOR, OURS, *(peer.name for peer in PEERS)]
Command = Callable[[Path], list[str]]
CPU_GOALS = {"TRL, default": "at least 1.6", FLOOR: "at least 0.80, that is within 1.25"}


@dataclass(frozen=True)
class Cost:
    """Cost of training: processor-seconds, seconds, checkpoint stalls as a share of time, peak MB.

    The figures cover a `share` of the steps; the steps before took `start` seconds.
    """

    cpu: float
    seconds: float
    stall: float
    memory: float
    share: float
    start: float


def cost_of(command: list[str], report: Path) -> Cost:
    """Run a command that writes the report. Raises DoesNotRun with its last output."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "10000",
        "DO_NOT_TRACK": "1",  # otherwise Axolotl sends telemetry
    }
    done = subprocess.run(command, cwd=report.parent, env=environment, capture_output=True, text=True, check=False)
    if done.returncode or not report.exists():
        raise DoesNotRun(f"does not run: {last_line(done.stderr)}")
    return Cost(**json.loads(report.read_text()))


def commands(name: str, work: Work, job: Path, cache: Path) -> dict[str, Command]:
    """Return the commands for a name; each is called with its report's path.

    Raises:
        DoesNotRun: its packages do not install, or it needs a GPU.
    """

    def measured(python: str, module: str, *arguments: str) -> Command:
        return lambda report: [python, "-m", MEASURED, str(report), str(work.threads), module, *arguments]

    if name == FLOOR:
        return {FLOOR: lambda report: [sys.executable, "-m", "benchmarks.trainers.hand_loop", work.folder, str(report)]}
    if name == OURS:
        return {OURS: measured(sys.executable, "recipes.train", str(job))}
    peer = next(peer for peer in PEERS if peer.name == name)
    python = peer_python(peer, cache)
    program = peer_program(peer)
    return {f"{name}, {variant}": measured(python, program, work.folder, variant) for variant in VARIANTS}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--shape", nargs="+", choices=sorted(SHAPES), default=["small"])
    options.add_argument("--method", nargs="+", choices=METHODS, default=["lora"])
    options.add_argument("--records", type=int, default=600)
    options.add_argument("--cache", type=Path, help="folder of the peers' environments, kept for later runs")
    options.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="what to measure")
    asked = options.parse_args()
    cache = asked.cache or Settings.load().home / "benchmarks" / "training"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "server").mkdir()
        server = Server("ours", Place(folder / "server", free_port(), f"sqlite:///{folder}/server/metadata.db"), cache)
        try:
            for name, method in itertools.product(asked.shape, asked.method):
                place = folder / f"{name}-{method}"
                work = make_work(place / "work", SHAPES[name], method, asked.records, os.cpu_count() or 1, folder / "models")
                compare(work, place, server, cache, asked.only)
        finally:
            server.stop()


def compare(work: Work, folder: Path, server: Server, cache: Path, names: list[str]) -> None:
    """Print the cost of the same work with each tool."""
    job = make_job(work, folder / "ours", f"http://127.0.0.1:{server.port}", new_run(server.port))
    (folder / "job.json").write_text(job.model_dump_json())
    machine = read_machine()
    where = ", ".join(machine.gpus) or f"{machine.processor}, {work.threads} threads"
    summary = f"{work.records} records, {work.tokens} useful tokens, rows of {work.sequence_length}"
    print(f"\n{work.method}, {summary}; {where}", flush=True)
    report(measured(names, work, folder, cache), work, job, machine.gpus)


def measured(names: list[str], work: Work, folder: Path, cache: Path) -> dict[str, Cost]:
    """Measure one after another; print immediately why a tool does not run."""
    costs: dict[str, Cost] = {}
    for name in names:
        try:
            for label, command in commands(name, work, folder / "job.json", cache).items():
                name = label
                path = folder / f"report-{len(costs)}.json"
                costs[label] = cost_of(command(path), path)
        except DoesNotRun as problem:
            print(f"{name} {problem}", flush=True)
    return costs


def report(costs: dict[str, Cost], work: Work, job: Job, gpus: tuple[str, ...]) -> None:
    def speed(cost: Cost) -> float:
        return work.tokens * cost.share / (cost.seconds if gpus else cost.cpu)

    unit = "tokens/s" if gpus else "tokens/cpu-s"
    start = f"{'start s':>9}" if gpus else ""
    print(f"\n{'':<28}{unit:>14}{'cpu-s':>9}{'seconds':>9}{'stall':>8}{'peak MB':>10}{start}{'MFU' if gpus else '':>8}")
    for name, cost in sorted(costs.items(), key=lambda item: -speed(item[1])):
        share = f"{cost.start:>9.1f}{mfu(speed(cost), job, gpus[0]):>8.1%}" if gpus else ""
        figures = f"{speed(cost):>14,.0f}{cost.cpu:>9.1f}{cost.seconds:>9.1f}{cost.stall:>8.1%}{cost.memory:>10,.0f}"
        print(f"{name:<28}{figures}{share}")
    if OURS not in costs:
        return
    print()
    for name, goal in CPU_GOALS.items():
        if name in costs:
            print(f"ours is {speed(costs[OURS]) / speed(costs[name]):.2f} times as fast as {name} (goal on a CPU: {goal})")
    peers = {name: cost for name, cost in costs.items() if name not in (OURS, FLOOR)}
    if peers:
        best = max(peers, key=lambda name: speed(peers[name]))
        ratio = speed(costs[OURS]) / speed(peers[best])
        print(f"ours is {ratio:.2f} times as fast as the best peer, {best} (goal on a GPU: at least 1)")
    if gpus:
        reached = mfu(speed(costs[OURS]), job, gpus[0])
        between = reached / (1 - costs[OURS].stall)
        goal = "goal, lora on the 7B shape: at least 50 %"
        print(f"ours has an MFU of useful tokens that is {reached:.1%}, and {between:.1%} between checkpoints ({goal})")


def mfu(tokens_per_second: float, job: Job, gpu: str) -> float:
    """Return the share of the GPU's peak, NaN if its peak is unknown."""
    recipe = Recipe.model_validate(job.parameters["recipe"])
    config = json.loads((Path(unquote(urlparse(recipe.base_model.uri).path)) / "config.json").read_text())
    peak = find_device_peak(gpu) or math.nan
    return tokens_per_second * estimate_flops_per_token(recipe, Architecture.from_config(config), recomputed=False) / peak


if __name__ == "__main__":
    main()
