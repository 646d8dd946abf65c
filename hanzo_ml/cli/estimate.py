"""`hanzo-ml job estimate`: what a job would need, before it is launched."""

from typing import Any

from hanzo_ml.cli.config_errors import about
from hanzo_ml.cli.connection import call
from hanzo_ml.cli.job import Changes, Config, Model, document_of
from hanzo_ml.cli.output import AsJson, show
from hanzo_ml.cli.terminal import plain

GIB = 1024**3


def estimate(config: Config = None, model: Model = None, set_: Changes = None, as_json: AsJson = False) -> None:
    """Tokens, steps, memory, hours and dollars of a job. One that cannot fit its memory is refused, with what would."""
    document = document_of(config, model, set_)
    with about(document, None if model or set_ else config):
        found = call("POST", "/v1/jobs/estimate", json=document)
    show(found) if as_json else print(plain("\n".join(lines(found))))


def lines(found: dict[str, Any]) -> list[str]:
    seed = found["seed_estimate"]
    most = "up to " if found["tokens"] < found["steps"] * found["tokens_per_step"] else ""
    said = [
        f"recipe    {found['recipe']} ({found['method']}, {found['objective']}) on {found['hardware']}",
        f"steps     {found['steps']:,} of {most}{found['tokens_per_step']:,} tokens: {found['tokens']:,} tokens",
        f"dataset   {dataset_words(found)}",
        f"scaling   {scaling_words(found)}",
        f"memory    {memory_words(found['memory'])}",
        f"disk      {found['disk'] or 'not known'}",
        f"time      {range_words(found['hours'], hours)}",
        f"cost      {range_words(found['dollars'], dollars)}",
        f"source    {found['source']}",
        f"seed      {seed['time'] or '-'}, {seed['cost'] or '-'} (the recipe's own figures)",
    ]
    return said + [f"note      {note}" for note in found["notes"]]


def dataset_words(found: dict[str, Any]) -> str:
    if found["dataset"] is None:
        return "not known"
    return f"{found['dataset']['count']:,} tokens ({found['dataset']['source']}); up to {found['epochs']:.1f} epochs"


def scaling_words(found: dict[str, Any]) -> str:
    """Beside what training from nothing would need: fine-tuning needs less, and nobody has a rule for it."""
    if found["tokens_per_parameter"] is None:
        return "not known"
    which = "parameter" if found["method"] == "full" else "trained parameter"
    best = f"{found['compute_optimal_tokens_per_parameter']} per parameter are best from nothing (Hoffmann et al. 2022)"
    return f"{found['tokens_per_parameter']:,.3g} tokens per {which} ({found['trained_parameters']:,}); {best}"


def memory_words(memory: dict[str, Any] | None) -> str:
    if memory is None:
        return "not known"
    there = f" of {memory['available'] / GIB:.1f} GiB" if memory["available"] else ""
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in memory["parts"].items() if size >= GIB / 200)
    return f"{memory['needed'] / GIB:.1f}{there} on {memory['where']} ({parts})"


def range_words(found: dict[str, float] | None, words: Any) -> str:
    return "not known" if found is None else f"{words(found['likely'])} ({words(found['low'])} to {words(found['high'])})"


def hours(value: float) -> str:
    """In the unit that people would say it in."""
    if value < 2 / 60:
        return f"{value * 3600:.0f} s"
    if value < 2:
        return f"{value * 60:.0f} min"
    return f"{value:.1f} h" if value < 100 else f"{value / 24:.1f} days"


def dollars(value: float) -> str:
    return f"${value:,.2f}" if value < 100 else f"${value:,.0f}"
