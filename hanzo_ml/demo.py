"""`hanzo-ml demo`: take raw data to a served and proved model."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from hanzo_ml.cli import model as model_command
from hanzo_ml.cli.connection import Refused, call
from hanzo_ml.cli.local import run_module
from hanzo_ml.cli.output import sanitize_text

DATASET, MODEL = "ellarin", "ellarin-assistant"
SOURCE = Path(__file__).resolve().parent.parent / "hanzo_ml_assets" / "defs" / DATASET / f"{DATASET}.jsonl"
BAR_CHARACTERS = "▁▂▃▄▅▆▇█"
POLL_SECONDS = 0.5
FAILURE_EVENTS = ("job.failed", "evaluation.failed", "deployment.failed")


@dataclass
class EventWatch:
    """Follow the event log from now on and time each phase.

    Waiting ends when `job` fails.
    """

    console: Console
    after: int = 0
    job: str = ""
    phases: dict[str, float] = field(default_factory=dict)

    @classmethod
    def from_now(cls, console: Console) -> "EventWatch":
        watch = cls(console)
        while events := call("GET", "/v1/events", params={"after": watch.after, "limit": 1000})["events"]:
            watch.after = events[-1]["seq"]
        return watch

    def wait_for(self, *types: str, key: str) -> dict[str, Any]:
        """Wait for the next event of one of these types about `key`.

        Raises Refused if the job failed instead.
        """
        while True:
            for event in call("GET", "/v1/events", params={"after": self.after, "limit": 1000})["events"]:
                self.after = event["seq"]
                if event["key"] == key and event["type"] in types:
                    return dict(event)
                if event["key"] in (key, self.job) and event["type"] in FAILURE_EVENTS:
                    reason = event["payload"].get("error") or event["payload"].get("reason")
                    raise Refused(f"{event['type']}: {reason}. See the runs page of Dagster for the whole log")
            time.sleep(POLL_SECONDS)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        with self.console.status(name):
            yield
        self.phases[name] = time.monotonic() - started
        self.console.print(f"  [green]✓[/green] {name} [dim]{self.phases[name]:.1f} s[/dim]")


@dataclass(frozen=True)
class Chain:
    """What the demo trains and serves, and where the engine that answers is reached."""

    engine: str
    request: dict[str, Any]
    """Body of `POST /v1/jobs`."""
    model: str = MODEL
    questions: tuple[str, ...] = ()
    """Asked in place of those that the evaluation has asked."""

    @property
    def command(self) -> str:
        """What a person types to submit it."""
        return f"job submit --model {self.model}"


def demo() -> None:
    """Take raw data to a served and proved model on this machine."""
    console = Console(highlight=False)
    console.rule("1  the stack")
    run_module("resources.stack.lifecycle", "up")
    addresses = call("GET", "/v1/addresses")
    watch = run_chain(console, Chain(addresses["engine"], {"name": MODEL, "model": MODEL}))
    console.rule()
    console.print(f"  {sum(watch.phases.values()):.0f} s in all, {watch.phases['training']:.0f} s of them training")
    console.print(
        f"  Dagster   {addresses['dagster']}\n  Tracking  {addresses['tracking']}\n  Engine    {addresses['engine']}"
    )
    console.print("  The stack keeps running: `make down` ends it, `make up` starts it again with everything still there.")


def run_chain(console: Console, chain: Chain) -> EventWatch:
    """Run the whole chain on the installation that the client is set to.

    Raises:
        Refused: a step failed, the gate did not accept the model, or its proof is broken.
    """
    watch = EventWatch.from_now(console)
    console.rule("2  a dataset version")
    print_command(console, f"dataset create --name {DATASET} --path {os.path.relpath(SOURCE)} --format jsonl")
    with watch.phase("create"), SOURCE.open("rb") as file:
        parts = [("files", (SOURCE.name, file))]
        version = call("POST", "/v1/datasets", data={"name": DATASET, "format": "jsonl"}, files=parts)
    console.print(f"  {DATASET}@{version['version']}: {version['num_records']} records")
    with watch.phase("split (sensor)"):
        while not call("GET", f"/v1/datasets/{version['id']}")["splits"]:
            if blocked := call("GET", f"/v1/datasets/{version['id']}/checks")["blocked"]:
                raise Refused(blocked)
            time.sleep(POLL_SECONDS)
    splits = call("GET", f"/v1/datasets/{version['id']}")["splits"]
    console.print("  " + ", ".join(f"{name} {part['num_records']}" for name, part in splits.items()))

    console.rule("3  fine-tuning")
    print_command(console, chain.command)
    job = watch.job = call("POST", "/v1/jobs", json=chain.request)["id"]
    with watch.phase("start (sensor)"):
        watch.wait_for("job.started", key=job)
    follow_training(watch, job)

    console.rule("4  evaluation, gate, registry, export")
    with watch.phase("evaluation (sensor)"):
        verdict = watch.wait_for("evaluation.completed", key=job)["payload"]["verdict"]
    with watch.phase("registration"):
        number = watch.wait_for("model.registered", key=chain.model)["payload"]["version"]
    with watch.phase("export"):
        watch.wait_for("model.exported", key=chain.model)
    report = call("GET", f"/v1/jobs/{job}")["evaluation"]["report"]
    show_report(console, report, verdict)
    if not verdict["accepted"]:
        raise Refused(f"version {number} is quarantined, nothing was deployed")

    console.rule("5  promotion and deployment")
    print_command(console, f"model promote --name {chain.model} --version {number} --stage production")
    call("PATCH", f"/v1/models/{chain.model}/versions/{number}/stage", json={"stage": "production"})
    with watch.phase("deployment (sensor)"):
        watch.wait_for("deployment.serving", key=chain.model)

    console.rule("6  what it knows now")
    before = {item["instruction"]: item["answers"]["base"] for item in report["questions"]}
    for question in chain.questions or before:
        answer = ask_model(chain.engine, chain.model, question)
        console.print(f"  [bold]{question}[/bold]")
        if question in before:
            console.print(sanitize_text(f"    before  {' '.join(before[question].split())}"), style="dim", markup=False)
        console.print(sanitize_text(f"    after   {answer}"), markup=False)
    console.rule("7  the proof")
    print_command(console, f"model prove {chain.model} {number}")
    with watch.phase("prove"):
        proof = call("GET", f"/v1/models/{chain.model}/versions/{number}/proof")
    model_command.print_proof(proof)
    if not proof["ok"]:
        raise Refused("the proof is broken")
    return watch


def print_command(console: Console, text: str) -> None:
    console.print(f"  [dim]$[/dim] hanzo-ml {text}")


def follow_training(watch: EventWatch, job: str) -> None:
    """Show progress by the run's metrics until the job ends, then the loss curve."""
    started = time.monotonic()
    columns = (TextColumn("  training"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=watch.console, transient=True) as progress:
        task = progress.add_task("loading the model", total=None)
        while call("GET", f"/v1/jobs/{job}")["status"] not in ("completed", "failed", "cancelled"):
            run = call("GET", f"/v1/runs/{job}")
            loss = next((point for point in run["metrics"] if point["key"] == "train/loss"), None)
            if loss:
                total = int(run["params"]["max_steps"])
                words = f"step {loss['step']}/{total}  loss {loss['value']:.3f}"
                progress.update(task, total=total, completed=loss["step"], description=words)
            time.sleep(POLL_SECONDS)
    watch.wait_for("job.completed", key=job)
    watch.phases["training"] = time.monotonic() - started
    watch.console.print(f"  [green]✓[/green] training [dim]{watch.phases['training']:.1f} s[/dim]")
    watch.console.print(f"  loss {draw_curve(read_losses(job))}")


def read_losses(job: str) -> list[float]:
    """The run's training losses in the order of their steps, from MLflow's own route."""
    path = "/api/2.0/mlflow/metrics/get-history"
    points = call("GET", path, params={"run_id": job, "metric_key": "train/loss", "max_results": 25000})["metrics"]
    return [float(point["value"]) for point in sorted(points, key=lambda point: int(point["step"]))]


def draw_curve(values: list[float], width: int = 60) -> str:
    """Values as a line of bars, with the first and the last in figures."""
    if not values:
        return "no values"
    picked = [values[index * (len(values) - 1) // max(width - 1, 1)] for index in range(min(width, len(values)))]
    top = max(values) or 1.0
    bars = "".join(BAR_CHARACTERS[min(int(value / top * len(BAR_CHARACTERS)), len(BAR_CHARACTERS) - 1)] for value in picked)
    return f"{values[0]:.2f} {bars} {values[-1]:.3f}"


def show_report(console: Console, report: dict[str, Any], verdict: dict[str, Any]) -> None:
    for name, scores in report["scores"].items():
        console.print(f"  {name:<9} accuracy {scores['accuracy']:.3f}   perplexity {scores['perplexity']:.3f}")
    words = "[green]accepted[/green]" if verdict["accepted"] else f"[red]quarantined[/red]: {'; '.join(verdict['reasons'])}"
    console.print(f"  gate: {words} ({report['num_records']} held-out records)")


def ask_model(engine: str, model: str, question: str) -> str:
    """The served model's answer, by the OpenAI-compatible route that any client uses."""
    body = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 24, "temperature": 0}
    answer = httpx.post(f"{engine}/v1/chat/completions", json=body, timeout=60, trust_env=False)
    if answer.is_error:
        raise Refused(f"the engine at {engine} answered {answer.status_code}: {answer.text[:200]}")
    return " ".join(answer.json()["choices"][0]["message"]["content"].split())
