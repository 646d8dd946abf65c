"""Measure artifact transfers to and from S3 over throttled connections.

Usage: python -m benchmarks.artifact_transfer [--files 8] [--megabytes 24] [--connection 10]

Each connection is limited to a number of megabytes per second, as real ones are. Compares our store with one object after
another over one connection, and with boto3, which MLflow's client calls for each file.
"""

import argparse
import multiprocessing
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import boto3
import obstore

from recipes.contracts.job import StoreAddress
from recipes.storage.artifact_store import Store
from recipes.storage.buckets import open_bucket
from recipes.storage.locations import resolve_uri
from tests.support.s3_server import BUCKETS, VARIABLES, s3_server

LATENCY_SECONDS = 0.03
"""Delay of the first block of a transfer, in addition to the time that the connection's rate requires."""
BLOCK = 1 << 16
URI = "s3://hanzo-ml/checkpoints/transfers"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--files", type=int, default=8)
    options.add_argument("--megabytes", type=int, default=24, help="size of each file")
    options.add_argument("--connection", type=float, default=10.0, help="megabytes per second of one connection")
    asked = options.parse_args()
    ours, theirs = multiprocessing.Pipe()
    spawned = multiprocessing.get_context("spawn")
    server = spawned.Process(target=serve, args=(theirs, asked.connection * 1e6), daemon=True)
    server.start()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "artifact"
            folder.mkdir()
            for number in range(asked.files):
                (folder / f"part-{number}").write_bytes(os.urandom(asked.megabytes << 20))
            report(measure(StoreAddress(root=ours.recv(), buckets=BUCKETS), folder, Path(scratch)), folder)
    finally:
        server.terminate()


def measure(address: StoreAddress, folder: Path, scratch: Path) -> dict[str, tuple[float, float]]:
    """Return the seconds of upload and download by each method."""
    store = Store(address, VARIABLES)
    place = resolve_uri(address, URI)
    bucket = open_bucket(place.bucket, address, VARIABLES)
    client = boto3.client(
        "s3",
        endpoint_url=address.root,
        aws_access_key_id=VARIABLES["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=VARIABLES["AWS_SECRET_ACCESS_KEY"],
        region_name="us-east-1",
    )
    files = sorted(folder.iterdir())

    def one_up() -> None:
        for file in files:
            obstore.put(bucket, f"one/{file.name}", file, max_concurrency=1)

    def one_down() -> None:
        for file in files:
            with (scratch / file.name).open("wb") as out:
                for chunk in obstore.get(bucket, f"one/{file.name}").stream():
                    out.write(chunk)

    def boto3_up() -> None:
        for file in files:
            client.upload_file(str(file), place.bucket, f"boto3/{file.name}")

    def boto3_down() -> None:
        for file in files:
            client.download_file(place.bucket, f"boto3/{file.name}", str(scratch / file.name))

    artifact = store.publish(folder, URI, "checkpoint")  # one-time loading and hashing are not measured
    client.list_buckets()
    return {
        "one after the other": (time_call(one_up), time_call(one_down)),
        "boto3": (time_call(boto3_up), time_call(boto3_down)),
        "ours": (
            time_call(lambda: store.publish_described(folder, f"{URI}/again", store.manifest(artifact))),
            time_call(lambda: store.fetch(artifact, scratch / "cache")),
        ),
    }


def report(found: dict[str, tuple[float, float]], folder: Path) -> None:
    size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    print(f"{size:,.0f} MB               up MB/s     down MB/s    ours/this, up   down")
    for name, (up, down) in found.items():
        ours_up, ours_down = found["ours"]
        print(f"{name:<22} {size / up:>9.0f} {size / down:>13.0f} {up / ours_up:>16.2f} {down / ours_down:>6.2f}")


def time_call(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def serve(connection: Connection, rate: float) -> None:
    """Run an S3 server behind a proxy that limits connections to `rate` bytes/s."""
    with s3_server() as server:
        host, port = server.url.removeprefix("http://").split(":")
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        connection.send(f"http://127.0.0.1:{listener.getsockname()[1]}")
        while True:
            near, _ = listener.accept()
            far = socket.create_connection((host, int(port)))
            for ends in ((near, far), (far, near)):
                threading.Thread(target=forward_throttled, args=(*ends, rate), daemon=True).start()


def forward_throttled(source: socket.socket, target: socket.socket, rate: float) -> None:
    due = 0.0
    with suppress(OSError):
        while block := source.recv(BLOCK):
            now = time.monotonic()
            due = max(due, now + LATENCY_SECONDS if now - due > LATENCY_SECONDS else due) + len(block) / rate
            time.sleep(max(0.0, due - now))
            target.sendall(block)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    main()
