"""Measure uploading a checkpoint to S3 and restoring it on all machines.

Usage: python -m benchmarks.multi_node_checkpoint [--machines 4] [--megabytes 400] [--network 20]

Each machine's network is limited to a number of megabytes per second. Compares the earlier method (one machine uploads
everything, each downloads everything) with the current one (each uploads its part and downloads its share). The transfer
between machines that the earlier method required is not counted.
"""

import argparse
import json
import multiprocessing
import socket
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from recipes.checkpoints.commit import commit_checkpoint
from recipes.checkpoints.manager import CheckpointManager
from recipes.checkpoints.node_parts import PART_KEY, PLACES_KEY, CheckpointPart, NodeShard, shard_rows
from recipes.contracts.job import StoreAddress
from recipes.storage.artifact_store import Store
from tests.support.s3_server import BUCKETS, VARIABLES, s3_server

BLOCK = 1 << 16
ROW_BYTES = 1_000_000
"""Size of a row in bytes."""
STEP = 6


@dataclass(frozen=True)
class Machine:
    """One of `of` machines; the first `saving` of them save `megabytes` together.

    `network` is in megabytes per second.
    """

    number: int
    of: int
    saving: int
    megabytes: int
    network: float

    def save(self, folder: Path) -> None:
        """Commit this machine's part, or everything if it alone saves."""
        rows = shard_rows(self.megabytes, self.number - 1, self.saving)
        scratch = folder / "scratch"
        scratch.mkdir(parents=True)
        weight = np.frombuffer(np.random.default_rng(self.number).bytes(len(rows) * ROW_BYTES), np.uint8).reshape(
            -1, ROW_BYTES
        )
        metadata = {PLACES_KEY: json.dumps({"weight": [rows.start, self.megabytes]})}
        save_file({"weight": weight}, scratch / f"model-rows-{self.number:05}-of-{self.saving:05}.safetensors", metadata)
        part = CheckpointPart(number=self.number, of=self.saving, save="a").model_dump(mode="json")
        commit_checkpoint(scratch, folder / str(STEP), {PART_KEY: part} if self.saving > 1 else {})

    def checkpoints(self, folder: Path, url: str) -> CheckpointManager:
        store = Store(StoreAddress(root=url, buckets=BUCKETS), VARIABLES)
        share = NodeShard(self.number, self.of, 1) if self.saving > 1 else None
        return CheckpointManager(folder, store, f"s3://hanzo-ml/checkpoints/by-{self.saving}", 3, share=share)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--machines", type=int, default=4)
    options.add_argument("--megabytes", type=int, default=400, help="size of the whole checkpoint")
    options.add_argument("--network", type=float, default=20.0, help="megabytes per second of each machine")
    asked = options.parse_args()
    spawned = multiprocessing.get_context("spawn")
    ours, theirs = spawned.Pipe()
    server = spawned.Process(target=serve, args=(theirs,))
    server.start()
    url = ours.recv()
    try:
        whole, parts = (
            measure(
                [
                    Machine(number + 1, asked.machines, saving, asked.megabytes, asked.network)
                    for number in range(asked.machines)
                ],
                url,
                spawned,
            )
            for saving in (1, asked.machines)
        )
    finally:
        server.terminate()
    print(f"{asked.megabytes} MB, {asked.machines} machines     up s   down s")
    for name, (up, down) in {"one sends, all fetch all": whole, "each its part and share": parts}.items():
        print(f"{name:<26} {up:>6.1f} {down:>8.1f}")
    print(f"{'ratio':<26} {whole[0] / parts[0]:>6.2f} {whole[1] / parts[1]:>8.2f}")


def measure(machines: list[Machine], url: str, spawned: SpawnContext) -> tuple[float, float]:
    """Return the seconds until everything is uploaded, and until all machines have restored it."""
    barrier, results = spawned.Barrier(len(machines)), spawned.Queue()
    started = [spawned.Process(target=report_timing, args=(machine, url, barrier, results)) for machine in machines]
    for process in started:
        process.start()
    took = [results.get() for _ in started]
    for process in started:
        process.join()
    if failed := [each for each in took if each is None]:
        raise SystemExit(f"{len(failed)} of {len(machines)} machines failed, see above")
    return max(up for up, _ in took), max(down for _, down in took)


def report_timing(machine: Machine, url: str, barrier: Any, results: Any) -> None:
    """Report a machine's times, or None on failure, so that none waits."""
    try:
        results.put(time_machine(machine, url, barrier))
    except BaseException:
        barrier.abort()
        results.put(None)
        raise


def time_machine(machine: Machine, url: str, barrier: Any) -> tuple[float, float]:
    near = Network(url, machine.network * 1e6).listen()
    with tempfile.TemporaryDirectory() as scratch:
        checkpoints = machine.checkpoints(Path(scratch, "saved"), near)
        if machine.number <= machine.saving:
            machine.save(checkpoints.folder)
        barrier.wait()
        began = time.perf_counter()
        if machine.number <= machine.saving:
            checkpoints.stored.send(STEP)
        up = time.perf_counter() - began
        barrier.wait()
        began = time.perf_counter()
        if machine.checkpoints(Path(scratch, "new"), near).latest() is None:
            raise RuntimeError("the checkpoint is incomplete")
        return up, time.perf_counter() - began


class Network:
    """A machine's network: its connections share `rate` bytes/s in each direction."""

    def __init__(self, url: str, rate: float) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._far = host, int(port)
        self._rate = rate
        self._due = [0.0, 0.0]
        self._lock = threading.Lock()

    def listen(self) -> str:
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    def _accept(self, listener: socket.socket) -> None:
        while True:
            near, _ = listener.accept()
            far = socket.create_connection(self._far)
            for way, ends in enumerate(((near, far), (far, near))):
                threading.Thread(target=self._pass_on, args=(way, *ends), daemon=True).start()

    def _pass_on(self, way: int, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while block := source.recv(BLOCK):
                time.sleep(max(0.0, self._turn(way, len(block)) - time.monotonic()))
                target.sendall(block)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _turn(self, way: int, size: int) -> float:
        """Return the time at which `size` more bytes have been transferred."""
        with self._lock:
            self._due[way] = max(self._due[way], time.monotonic()) + size / self._rate
            return self._due[way]


def serve(results: Connection) -> None:
    with s3_server() as server:
        results.send(server.url)
        threading.Event().wait()


if __name__ == "__main__":
    main()
