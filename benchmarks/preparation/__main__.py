"""Compare ways to prepare the same generated records.

Usage: python -m benchmarks.preparation [--records 500000] [--shape messages] [--ways datasets.map] [--processes 1 2]

Prints for each way: rows per processor-second, seconds, peak memory of all processes together, and the number of records
kept; then our speed relative to the others and to the lower bound. Processor-seconds are comparable even on a machine that
does other work too.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.preparation.corpus import Shape, write_corpus
from benchmarks.preparation.peers import TYPICAL, WAYS
from benchmarks.trainers.peers import DoesNotRun, last_line, peer_python
from recipes.contracts.job import Hardware, Job, Program, StoreAddress
from recipes.contracts.parameters import TokenizeParameters
from recipes.preparation.tokenization.frozen_tokenizer import export_tokenizer, read_frozen_tokenizer
from recipes.storage.artifact_store import Store
from resources.datasets.prepared_versions import output_uris
from resources.settings.settings import Settings

REPOSITORY = Path(__file__).parents[2]
FLOOR_NAME = "floor: bare encode_batch_fast"
OURS = "ours"
GOAL, FLOOR_GOAL = 5, 1.3
"""Required speedup over the documented way, and maximum ratio to the floor; by processor-seconds."""
FLOOR = """
import json, sys
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[2] + "/tokenizer.json")
before, after = json.load(open(sys.argv[2] + "/around.json"))
batch = []
def texts(row):
    if "messages" in row:
        return [message["content"] for message in row["messages"]]
    return [before + row["instruction"] + after, row["answer"]]
def encode():
    tokenizer.encode_batch_fast([text for row in batch for text in texts(row)], add_special_tokens=False)
    batch.clear()
for line in open(sys.argv[1], encoding="utf-8"):
    batch.append(json.loads(line))
    if len(batch) == 1024:
        encode()
encode()
"""


@dataclass(frozen=True)
class Cost:
    """Cost of a command and its processes; peak memory is in MB.

    `cpu` is in processor-seconds, `kept` the number of records that were kept.
    """

    cpu: float
    seconds: float
    memory: float
    kept: int | None


def measure_cost(command: list[str]) -> Cost:
    """Run a command. Raises DoesNotRun with its last output if it fails."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"}
    before, started = os.times(), time.monotonic()
    peak = 0
    with tempfile.TemporaryFile("w+") as log:
        print(".", end="", flush=True)
        process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log)
        tree = psutil.Process(process.pid)
        while process.poll() is None:
            peak = max(peak, tree_memory(tree))
            time.sleep(0.5)
        log.seek(0)
        text = log.read()
        if process.returncode:
            raise DoesNotRun(f"failed: {last_line(text)}")
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return Cost(cpu, time.monotonic() - started, peak / 1e6, parse_kept_records(text))


def parse_kept_records(said: str) -> int | None:
    """Parse how many records a way kept; None for a floor, which drops nothing."""
    splits = re.search(r"-> train (\d+), validation (\d+), test (\d+);", said)
    found = re.search(r"(\d+) records kept", said)
    return sum(map(int, splits.groups())) if splits else int(found[1]) if found else None


def tree_memory(tree: psutil.Process) -> int:
    """Return the proportional set size of a process and its descendants."""
    total = 0
    try:
        for process in (tree, *tree.children(recursive=True)):
            total += process.memory_full_info().pss
    except psutil.Error:  # one of them has just ended
        pass
    return total


def our_job(folder: Path, source: Path, tokenizer: Path, workers: int) -> list[str]:
    """Return the command of our program, with a separate store."""
    place = folder / f"ours-{workers}"
    store = Store(StoreAddress(root=(place / "objects").as_uri(), buckets={"datasets": "d"}))
    raw = place / "raw"
    raw.mkdir(parents=True)
    os.link(source, raw / source.name)
    uri = "s3://hanzo-ml/datasets/b"
    job = Job(
        id="benchmark",
        program=Program.PREPARE,
        inputs={"dataset": store.publish(raw, f"{uri}/1/records", "dataset")},
        parameters={"tokenize": {"tokenizer": tokenizer.as_uri()}, "filter": {"language": "en"}},
        outputs=output_uris(f"{uri}/2"),
        result_uri=f"{uri}/2/result.json",
        store=store.address,
        work_dir=str(place / "work"),
        cache_dir=str(place / "cache"),
        hardware=Hardware(cpu=workers),
    )
    (place / "job.json").write_text(job.model_dump_json())
    return [sys.executable, "-m", "recipes.prepare", str(place / "job.json")]


def tokenizer_folder(folder: Path, reference: str) -> Path:
    """Write the tokenizer for transformers; `around.json` is the template's text around a question."""
    asked = TokenizeParameters(tokenizer=reference)
    export_tokenizer(
        asked, StoreAddress(root=(folder / "base").as_uri(), buckets={"models": "m"}), folder, folder / "frozen"
    )
    frozen = read_frozen_tokenizer(folder / "frozen")
    target = folder / "tokenizer"
    target.mkdir()
    (target / "tokenizer.json").write_bytes((folder / "frozen" / "tokenizer.json").read_bytes())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": frozen.template, **frozen.special}
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    (target / "around.json").write_text(json.dumps(frozen.around))
    return target


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--records", type=int, default=500_000)
    options.add_argument("--shape", type=Shape, choices=list(Shape), default=Shape.INSTRUCTION)
    options.add_argument("--cache", type=Path, help="folder of the peers' environments, kept for later runs")
    options.add_argument("--tokenizer", default="recipe:smollm2-135m-lora")
    cores = os.cpu_count() or 1
    options.add_argument("--ways", nargs="*", choices=[way.name for way in WAYS], help="compared with ours (default: all)")
    options.add_argument("--processes", type=int, nargs="*", default=list(dict.fromkeys((1, cores))))
    asked = options.parse_args()
    ways = [way for way in WAYS if asked.ways is None or way.name in asked.ways]
    cache = asked.cache or Settings.load().home / "benchmarks" / "preparation"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        source, target = folder / "records.jsonl", folder / "peer"
        write_corpus(source, asked.records, asked.shape)
        tokenizer = tokenizer_folder(folder, asked.tokenizer)
        print(f"{asked.records} records ({asked.shape}), {source.stat().st_size / 1e6:.0f} MB, {cores} cores")
        costs = {
            FLOOR_NAME: measure_cost([sys.executable, "-c", FLOOR, str(source), str(tokenizer)]),
            "floor: a copy of the file": measure_cost(["cp", str(source), str(folder / "copy")]),
        }
        for workers in asked.processes:
            costs[of("ours", workers)] = measure_cost(our_job(folder, source, tokenizer, workers))
            for way in ways:
                if asked.shape in way.shapes and (workers == 1 or way.shares):
                    try:
                        command = [peer_python(way.peer, cache), "-m", f"benchmarks.preparation.{way.peer.module}"]
                        way_options = [str(workers), way.option] if way.shares else []
                        costs[of(way.name, workers)] = measure_cost(
                            [*command, str(source), str(tokenizer), str(target), *way_options]
                        )
                    except DoesNotRun as reason:
                        print(f"{way.name} {reason}")
                    shutil.rmtree(target, ignore_errors=True)
                    shutil.rmtree(f"{target}-cache", ignore_errors=True)
        report(costs, asked.records)


def of(name: str, workers: int) -> str:
    return f"{name}, {workers} process{'es' * (workers > 1)}"


def report(costs: dict[str, Cost], records: int) -> None:
    print(f"\n{'':<40}{'rows/cpu-s':>12}{'cpu-s':>10}{'seconds':>10}{'peak MB':>10}{'kept':>10}")
    for name, cost in costs.items():
        figures = f"{records / cost.cpu:>12,.0f}{cost.cpu:>10.1f}{cost.seconds:>10.1f}{cost.memory:>10.0f}"
        print(f"{name:<40}{figures}{'' if cost.kept is None else cost.kept:>10}")
    print()
    for name, ours in costs.items():
        if name.startswith(OURS):
            ratios = [f"{ours.cpu / costs[FLOOR_NAME].cpu:.2f} times the floor (goal {FLOOR_GOAL} at most)"]
            for way in WAYS:
                if theirs := costs.get(f"{way.name}{name.removeprefix(OURS)}"):
                    ratios.append(f"{theirs.cpu / ours.cpu:.1f}x {way.name}{f' (goal {GOAL})' if way is TYPICAL else ''}")
            print(f"{name}: {'; '.join(ratios)}")
    missed = goals_missed(costs)
    print("\n".join(["MISSED:", *missed] if missed else ["every goal that was measured is met"]))


def goals_missed(costs: Mapping[str, Cost]) -> list[str]:
    """Return the missed goals, by processor-seconds, for any number of processes."""
    found = []
    for name, cost in costs.items():
        if not name.startswith(OURS):
            continue
        if (floors := cost.cpu / costs[FLOOR_NAME].cpu) > FLOOR_GOAL:
            found.append(f"  {name}: {floors:.2f} times the floor, the goal is {FLOOR_GOAL} at most")
        theirs = costs.get(f"{TYPICAL.name}{name.removeprefix(OURS)}")
        if theirs is not None and (ratio := theirs.cpu / cost.cpu) < GOAL:
            found.append(f"  {name}: {ratio:.1f}x {TYPICAL.name}, the goal is {GOAL}x")
        if theirs is not None and theirs.kept != cost.kept:
            found.append(f"  {name}: {cost.kept} records kept, {TYPICAL.name} keeps {theirs.kept}: not the same work")
    return found


if __name__ == "__main__":
    main()
