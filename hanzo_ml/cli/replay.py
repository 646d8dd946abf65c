"""`hanzo-ml run replay`: a finished run once more from its record alone, and whether the same came out."""

from typing import Any

import typer

from hanzo_ml.cli.connection import Refused, call
from hanzo_ml.cli.idempotency import Key, start
from hanzo_ml.cli.job_polling import begun_job, ended_job, tell
from hanzo_ml.cli.output import AsJson, show
from hanzo_ml.cli.terminal import plain


def replay(run_id: str, key: Key = None, as_json: AsJson = False) -> None:
    """Run a finished training run again and compare. Exits with 1 when a loss or the final weights differ.

    The new run is trained by the same path as any job, and is neither evaluated
    nor registered. Given a replay, it waits for that one, or says what came of it.
    """
    job = run_id if is_replay(run_id) else replayed(run_id, key)
    begun_job(job)
    ended = ended_job(job)
    if ended["status"] != "completed":
        raise Refused(f"replay {job} {ended['status']}: {ended['reason']}")
    verdict = call("GET", f"/v1/runs/{job}/replay")
    if as_json:
        show(verdict)
    else:
        print(plain("\n".join(lines_of(verdict))))
    if not verdict["equal"]:
        raise typer.Exit(1)


def is_replay(run_id: str) -> bool:
    """Whether a run is one itself: where waiting for it was broken off, its verdict is still to be had."""
    try:
        return bool(call("GET", f"/v1/jobs/{run_id}")["config"].get("replay_of"))
    except Refused:  # the replay's own refusal says what the run lacks
        return False


def replayed(run_id: str, key: str | None) -> str:
    """The job that trains the run once more."""
    submitted = start(f"/v1/runs/{run_id}/replay", key)
    job = str(submitted["job"]["id"])
    for line in environment_lines(submitted["environment"]):
        tell(line)
    tell(f"replaying {run_id} as {job}: `hanzo-ml job logs {job} --follow` shows it")
    tell(f"this waits for it; once broken off, `hanzo-ml run replay {job}` goes on waiting")
    return job


def environment_lines(differences: list[dict[str, str]]) -> list[str]:
    """One line for each thing that differs, below one that says what it means; none where all is the same."""
    if not differences:
        return []
    told = [f"  {each['what']}: {each['then']} then, {each['now']} now" for each in differences]
    return ["the environment is not that of the first run, so results may differ:", *told]


def healing_lines(unrepeated: list[dict[str, Any]]) -> list[str]:
    """One line for each thing that only one of both runs was healed of, below one that says what it means."""
    if not unrepeated:
        return []
    other = {"run": "in the first run, not in the replay", "replay": "in the replay, not in the first run"}
    told = [f"  {other[each['of']]}: {each['what']}" for each in unrepeated]
    return ["only one of the runs was healed of something, so results may differ from there on:", *told]


def lines_of(verdict: dict[str, Any]) -> list[str]:
    """A verdict for people: what came out, then what may explain it."""
    first = verdict["first_difference"]
    if first is None:
        steps = verdict["steps"]
        losses = "the one loss is equal" if steps == 1 else f"all {steps:,} losses are equal"
    else:
        losses = f"step {first['step']} is the first that differs: loss {first['then']} then, {first['now']} now"
    untrue = verdict["untrue"]
    weights = [f"{each['path']} has SHA-256 {each['now']}, then {each['then']}" for each in verdict["weights"]]
    told = [
        "reproduced" if verdict["equal"] else "not reproduced",
        losses,
        *([untrue_words(untrue)] if untrue else []),
        *(weights or ["the final weights are equal"]),
    ]
    why = [*healing_lines(verdict["unrepeated"]), *environment_lines(verdict["environment"])]
    return [f"{told[0]}: {told[1]}", *told[2:], *why]


def untrue_words(found: dict[str, Any]) -> str:
    step, now, then = found["step"], found["now"], found["then"]
    return f"step {step} of the first run is tracked with loss {now}, and had {then}: it was changed since"
