"""Measure the pipeline's overhead: seconds per phase, share of training steps, hand-over times.

Runs the demo in a new state folder, from an empty one to a verified model in production, and reads the event log.
Usage: `make bench`, or `python benchmarks/end_to_end.py [--json]`; the demo's ports must be free.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from typing import Any

PHASES = (
    ("split the dataset", "dataset.created", "dataset.split"),
    ("start the training run", "job.submitted", "job.started"),
    ("train, with start-up and model loading", "job.started", "job.completed"),
    ("evaluate base and tuned", "evaluation.started", "evaluation.completed"),
    ("register", "evaluation.completed", "model.registered"),
    ("merge, check, export", "model.registered", "model.exported"),
    ("deploy: verify, load, warm, swap", "deployment.started", "deployment.serving"),
)
HAND_OVERS = (
    ("checkpoint complete -> evaluation started", "job.completed", "evaluation.started"),
    ("promoted -> serving", "model.promoted", "deployment.serving"),
)
TRACKING = "http://127.0.0.1:8057"


def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "HANZO_ML_HOME": home}
        command = [sys.executable, "-c", "from hanzo_ml.cli import main; main()"]
        started = time.monotonic()
        done = subprocess.run([*command, "demo"], env=environment, check=False)
        total = time.monotonic() - started
        try:
            if done.returncode:
                sys.exit("the demo failed: no figures")
            with urllib.request.urlopen(f"{TRACKING}/v1/events?limit=1000") as answer:
                events: list[dict[str, Any]] = json.load(answer)["events"]
        finally:
            subprocess.run([*command, "down"], env=environment, check=False)
    report(events, total)


def report(events: list[dict[str, Any]], total: float) -> None:
    at = {event["type"]: event["created_at"] / 1000 for event in events}
    training = next(float(event["payload"]["training_seconds"]) for event in events if event["type"] == "job.completed")
    figures = {name: at[end] - at[begin] for name, begin, end in PHASES}
    hand_overs = {name: at[end] - at[begin] for name, begin, end in HAND_OVERS}
    share = 1 - training / total
    if "--json" in sys.argv:
        print(json.dumps({"phases": figures, "hand_overs": hand_overs, "total": total, "training_steps": training}))
        return
    print("\nphase                                        seconds   share of all")
    for name, seconds in figures.items():
        print(f"{name:<44}{seconds:>8.1f}   {seconds / total:>6.1%}")
    print(f"{'all, from an empty state folder':<44}{total:>8.1f}")
    print(f"{'of that in training steps':<44}{training:>8.1f}   {training / total:>6.1%}")
    print(f"{'overhead around them (aim: under 35 %)':<44}{total - training:>8.1f}   {share:>6.1%}")
    print("\nhand-over (aim: under 10 s each)             seconds")
    for name, seconds in hand_overs.items():
        print(f"{name:<44}{seconds:>8.1f}")


if __name__ == "__main__":
    main()
