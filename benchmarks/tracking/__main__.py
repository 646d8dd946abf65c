"""Compare tracking servers on each database. Exits with 1 on a missed goal."""

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

from benchmarks.tracking.cases import CASES, Case, Loaded, prepare_reads
from benchmarks.tracking.goals import OURS, Idle, Result, Results, goals_missed, left_out, times, verdict
from benchmarks.tracking.load_generator import median
from benchmarks.tracking.lower_bounds import committed_rows, copied_rows, sqlite_rows
from benchmarks.tracking.process_cost import processor_seconds, with_children
from benchmarks.tracking.scaling import measure_scale
from benchmarks.tracking.servers import DURABILITY, KINDS, Place, Server, free_port
from resources.settings.settings import Settings
from tests.support.postgres_server import PostgresServer

BARE = "bare"
"""FastAPI without any work: the lower bound of writing calls."""


def main() -> int:
    # When a benchmark is stopped early, it stops its servers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
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
            if options.scale:
                grow(database, options, cache, folder, postgres)
            else:
                missed += measure(database, options, cache, folder, postgres)
    if options.scale:
        return 0
    print(f"\n{verdict(missed, left_out(options))}")
    return 1 if missed else 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tracking", description=__doc__)
    cases = sorted({case.name for case in CASES})
    for option, known in (("--only", cases), ("--servers", KINDS), ("--database", DURABILITY)):
        parser.add_argument(option, type=some_of(known), default=list(known), help=", ".join(known))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds of load in each round")
    parser.add_argument("--runs", type=int, help="runs to search (default: 2,000, or 10,000 with --scale)")
    parser.add_argument("--scale", action="store_true", help="measure only ours, while its tables grow")
    parser.add_argument("--points", type=int, default=50_000_000, help="with --scale: final number of points in all series")
    options = parser.parse_args()
    options.runs = options.runs or (10_000 if options.scale else 2000)
    return options


def some_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """Return a parser of comma-separated names.

    Unknown names are refused: a case that is left out would look like one that was met.
    """

    def names(text: str) -> list[str]:
        if unknown := sorted({*text.split(",")} - {*known}):
            raise argparse.ArgumentTypeError(f"there is no {unknown[0]}: choose from {', '.join(known)}")
        return text.split(",")

    return names


def measure(
    database: str, options: argparse.Namespace, cache: Path, folder: Path, postgres: PostgresServer | None
) -> list[str]:
    """Measure the selected cases on one kind of database. Returns the missed goals."""
    cases = [case for case in CASES if case.name in options.only]
    print(f"\n{database} ({DURABILITY[database]})")
    with ExitStack() as stack:
        loaded: dict[str, Loaded] = {}
        idle: dict[str, Idle] = {}
        used: dict[str, Callable[[], float]] = {}
        of_database = postgres_seconds(postgres) if postgres is not None else lambda: 0.0
        for name in (name for name in options.servers if database in KINDS[name].databases):
            place = new_place(folder / name, postgres)
            server = Server(name, place, cache)
            stack.callback(server.stop)
            idle[name] = Idle(server.ready_after, server.memory())
            print(f"  {name}: healthy after {idle[name].ready_after:.2f} s, {idle[name].memory:.0f} MB PSS")
            loaded[name] = Loaded(place.port)
            used[name] = server.processor_seconds
            server.settle()
            if name != BARE and any(case.reads for case in cases):
                prepare_reads(loaded[name], options.runs)
        floor = copied_rows(postgres.url("postgres")) if postgres is not None else sqlite_rows(folder)
        print(f"  floor: {floor:,.0f} rows/s written without a server")
        if postgres is not None:
            print(f"  floor: {committed_rows(postgres.url('postgres')):,.0f} commits/s of one row without a server")
        results: Results = {}
        for case in cases:
            names = [name for name in loaded if not (case.reads and name == BARE)]
            rounds: dict[str, list[Result]] = {name: [] for name in names}
            for number in range(options.rounds):
                # Rotate the order of servers, so that none is always the first after a pause.
                first = number % len(names)
                for name in names[first:] + names[:first]:
                    before = used[name]() + of_database()
                    measured = case.measure(loaded[name], case.clients, options.seconds)
                    seconds = used[name]() + of_database() - before
                    rounds[name].append(Result(measured.figure, seconds * 1000 / measured.calls))
            results[case.name, case.clients] = {name: medians(found) for name, found in rounds.items()}
            print_case(case, results[case.name, case.clients])
        return goals_missed(database, cases, results, idle)


def grow(database: str, options: argparse.Namespace, cache: Path, folder: Path, postgres: PostgresServer | None) -> None:
    print(f"\n{database}")
    place = new_place(folder / "ours", postgres)
    measure_scale(place, lambda: Server("ours", place, cache), options.runs, options.points, options.seconds)


def new_place(folder: Path, postgres: PostgresServer | None) -> Place:
    folder.mkdir()
    if postgres is None:
        return Place(folder, free_port(), f"sqlite:///{folder / 'metadata.db'}")
    name = f"bench_{uuid4().hex[:12]}"
    postgres.execute(f"CREATE DATABASE {name}")
    return Place(folder, free_port(), postgres.url(name))


def postgres_seconds(server: PostgresServer) -> Callable[[], float]:
    """Return a function that reads the processor time of a PostgreSQL server."""
    main = int((server.folder / "data" / "postmaster.pid").read_text().split()[0])
    return lambda: processor_seconds(with_children(main))


def medians(rounds: list[Result]) -> Result:
    return Result(median([result.figure for result in rounds]), median([result.processor for result in rounds]))


def print_case(case: Case, results: dict[str, Result]) -> None:
    title = f"{case.name}, {case.clients} client{'s' if case.clients > 1 else ''}"
    print(f"  {title}:", flush=True)
    for name, found in results.items():
        figure = f"{found.figure:,.2f}" if found.figure < 100 else f"{found.figure:,.0f}"
        line = f"    {name:16}{figure:>10} {case.unit:9}{found.processor:9.3f} ms of processor a call"
        for ours in [ours for ours in OURS if ours in results and name not in (*OURS, BARE)]:
            better, less = times(case, results, ours, name), cheaper(results, ours, name)
            line += f"   {ours}: {better:.1f}x, {less:.1f}x by processor"
        print(line, flush=True)


def cheaper(results: dict[str, Result], ours: str, theirs: str) -> float:
    """Return how many times less processor time our calls take."""
    return results[theirs].processor / results[ours].processor


if __name__ == "__main__":
    sys.exit(main())
