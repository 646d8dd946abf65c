"""Measures servers over one database after another, and prints how much faster ours is, goal by goal."""

import argparse
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

from benchmarks.tracking.cases import CASES, GOALS, Case, Loaded, prepare_reads
from benchmarks.tracking.floors import copied_rows, sqlite_rows
from benchmarks.tracking.load import median
from benchmarks.tracking.servers import DURABILITY, KINDS, Place, Server, free_port
from resources.settings import Settings
from tests.postgres import PostgresServer

BARE = "bare"
"""FastAPI that does nothing: the floor of the calls that write."""

Results = dict[tuple[str, int], dict[str, float]]
"""Name and clients of a case -> server -> the median of its rounds."""


def main() -> int:
    options = parsed()
    cache = Settings.load().home / "benchmarks"
    missed: list[str] = []
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start, {options.rounds} rounds, medians")
    with ExitStack() as stack:
        for database in options.database:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            postgres = PostgresServer(fsync=True) if database == "postgresql" else None
            if postgres is not None:
                stack.callback(postgres.stop)
            missed += measure(database, options, cache, folder, postgres)
    print("\nevery goal is met" if not missed else "\nMISSED:\n" + "\n".join(missed))
    return 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tracking", description=__doc__)
    parser.add_argument(
        "--only", type=with_commas, default=sorted({case.name for case in CASES}), help="cases, with commas between"
    )
    parser.add_argument("--servers", type=with_commas, default=list(KINDS), help=", ".join(KINDS))
    parser.add_argument("--database", type=with_commas, default=list(DURABILITY), help=", ".join(DURABILITY))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of load in each round")
    parser.add_argument("--runs", type=int, default=2000, help="that are searched")
    return parser.parse_args()


def with_commas(text: str) -> list[str]:
    return text.split(",")


def measure(
    database: str, options: argparse.Namespace, cache: Path, folder: Path, postgres: PostgresServer | None
) -> list[str]:
    """All that is asked for over one kind of database. Returns the goals that were missed."""
    cases = [case for case in CASES if case.name in options.only]
    print(f"\n{database} ({DURABILITY[database]})")
    with ExitStack() as stack:
        loaded: dict[str, Loaded] = {}
        for name in options.servers:
            place = new_place(folder / name, postgres)
            server = Server(name, place, cache)
            stack.callback(server.stop)
            print(f"  {name}: healthy after {server.ready_after:.2f} s, {server.memory():.0f} MB PSS")
            loaded[name] = Loaded(place.port)
            if name != BARE and any(case.reads for case in cases):
                prepare_reads(loaded[name], options.runs)
        floor = copied_rows(postgres.url("postgres")) if postgres is not None else sqlite_rows(folder)
        print(f"  floor: {floor:,.0f} rows/s written without a server")
        results: Results = {}
        for case in cases:
            names = [name for name in loaded if not (case.reads and name == BARE)]
            rounds: dict[str, list[float]] = {name: [] for name in names}
            for number in range(options.rounds):
                # Each round begins with another server, so that none is always the one after a pause.
                first = number % len(names)
                for name in names[first:] + names[:first]:
                    rounds[name].append(case.measure(loaded[name], case.clients, options.seconds))
            results[case.name, case.clients] = {name: median(values) for name, values in rounds.items()}
            print_case(case, results[case.name, case.clients])
        return goals_missed(database, cases, results)


def new_place(folder: Path, postgres: PostgresServer | None) -> Place:
    folder.mkdir()
    if postgres is None:
        return Place(folder, free_port(), f"sqlite:///{folder / 'metadata.db'}")
    name = f"bench_{uuid4().hex[:12]}"
    postgres.execute(f"CREATE DATABASE {name}")
    return Place(folder, free_port(), postgres.url(name))


def print_case(case: Case, results: dict[str, float]) -> None:
    title = f"{case.name}, {case.clients} client{'s' if case.clients > 1 else ''}, {case.unit}"
    shown = [f"{name} {value:,.2f}" if value < 100 else f"{name} {value:,.0f}" for name, value in results.items()]
    ratios = [
        f"{times(case, results, name):.1f}x {name}" for name in results if "ours" in results and name not in ("ours", BARE)
    ]
    print(f"  {title}: {' | '.join(shown)}   {'   '.join(ratios)}", flush=True)


def times(case: Case, results: dict[str, float], name: str) -> float:
    """How many times better ours is."""
    ours, theirs = results["ours"], results[name]
    return ours / theirs if case.more_is_better else theirs / ours


def goals_missed(database: str, cases: list[Case], results: Results) -> list[str]:
    return [
        f"  {database}, {case.name}, {case.clients} clients: {times(case, found, name):.1f}x {name}, the goal is {goal:.0f}x"
        for case in cases
        for name, goal in GOALS.items()
        if {"ours", name} <= (found := results[case.name, case.clients]).keys() and times(case, found, name) < goal
    ]


if __name__ == "__main__":
    sys.exit(main())
