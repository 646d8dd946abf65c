"""Start and stop the embedded stack, the five processes of a laptop.

`up` starts the services that do not run, so it also repairs the stack after one was killed; `down` ends all without losing
work. On a cluster the same processes are containers, and this module is not used.
"""

import json
import os
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from rich.console import Console
from sqlalchemy.exc import SQLAlchemyError

from recipes.contracts.job import EXIT_BAD_CONFIGURATION, BadConfiguration
from recipes.storage.artifact_store import Store
from resources.installation import SOURCE
from resources.metadata.database import Database
from resources.object_store.health import find_store_problem_in_time
from resources.orchestration.instance import migrate_dagster
from resources.settings.document import home_folder_error
from resources.settings.settings import Settings
from resources.stack.detached_process import (
    LOG_FILE,
    is_running,
    kill_orphans,
    kill_process,
    lock_folder,
    read_pid,
    send_signal,
    start_detached,
    stop_process,
)
from resources.stack.failure_summary import failure_summary
from resources.stack.services import Service, list_services, service_environment

START_TIMEOUT_SECONDS = 120.0
GRACE_SECONDS = 20.0
JOB_GRACE_SECONDS = 300.0
KILL_SECONDS = 60.0
"""Time for the kernel to end killed processes: it takes seconds for a job with hundreds of GB or a GPU."""
DIRECT_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opener without the machine's HTTP proxy, for requests to this machine: through a proxy the stack did not become ready
within two minutes."""
UNREACHABLE_ERROR = "dagster._core.errors.DagsterUserCodeUnreachableError"


def service_folder(settings: Settings, name: str) -> Path:
    return settings.home / "services" / name


def up(settings: Settings, console: Console) -> None:
    """Start all stopped services and wait until they answer.

    Raises:
        BadConfiguration: a port is in use, or a service did not start; the message says what to do.
    """
    for service in stopped_services(settings):
        check_port(service)
    settings.home.mkdir(parents=True, exist_ok=True)
    with exclusive_access(settings, console):
        start_stopped_services(settings, console)
    print_store_problem(settings, console)


def print_store_problem(settings: Settings, console: Console) -> None:
    """Print a line if the object store is unusable, so that all jobs would fail."""
    if problem := find_store_problem_in_time(Store(settings.store, settings.storage.variables)):
        console.print(f"  object store       {problem}", markup=False, soft_wrap=True)


@contextmanager
def exclusive_access(settings: Settings, console: Console) -> Iterator[None]:
    """Wait until no other `up` or `down` runs on this state folder.

    Without the lock, one left half of what the other had just started.
    """
    announced = False
    while True:
        with lock_folder(settings.home) as descriptor:
            if descriptor is not None:
                yield
                return
        if not announced:
            console.print("  another `up` or `down` is running: waiting for it to end")
            announced = True
        time.sleep(0.1)


def stopped_services(settings: Settings) -> list[Service]:
    return [service for service in list_services(settings) if not is_running(service_folder(settings, service.name))]


def start_stopped_services(settings: Settings, console: Console) -> None:
    started = time.monotonic()
    wanted, missing = list_services(settings), stopped_services(settings)
    settings.run_workers.mkdir(exist_ok=True)
    try:
        Database(settings.database_url, settings.database.connect_seconds).migrate()
    except SQLAlchemyError as problem:
        reason = str(getattr(problem, "orig", problem)).partition("\n")[0]
        raise BadConfiguration(f"the metadata database was not changed: {reason}") from None
    migrate_dagster(settings, console)
    ready: dict[str, float] = {}
    with console.status("starting") as status:
        while len(ready) < len(wanted):
            for service in wanted:
                if service.name in ready or not all(name in ready for name in service.after):
                    continue
                folder = service_folder(settings, service.name)
                if service in missing:
                    missing.remove(service)
                    launch_service(service, folder, service_environment(settings))
                elif not is_running(folder):
                    raise BadConfiguration(
                        f"{service.name} ended while starting: {failure_summary(read_service_log(folder))}"
                    )
                if is_ready(service):
                    ready[service.name] = time.monotonic() - started
                    console.print(f"  {service.name:<18} ready after {ready[service.name]:.1f} s")
            if time.monotonic() - started > START_TIMEOUT_SECONDS:
                late = ", ".join(service.name for service in wanted if service.name not in ready)
                raise BadConfiguration(
                    f"{late} did not answer within {START_TIMEOUT_SECONDS:.0f} s: see {settings.home}/services/*/log.txt"
                )
            status.update("starting " + ", ".join(service.name for service in wanted if service.name not in ready))
            time.sleep(0.2)
        status.update("loading the asset graph")
        wait_for_definitions(settings, started + START_TIMEOUT_SECONDS)


def wait_for_definitions(settings: Settings, until: float) -> None:
    """Wait until Dagster has loaded the asset graph, at most until the monotonic time `until`.

    Its processes answer without the graph, too. The webserver reconnects by itself to a restarted code server, and reports
    it as unreachable for a moment.

    Raises:
        BadConfiguration: the graph cannot be loaded; the message contains Dagster's reason.
    """
    while problem := find_definitions_problem(settings):
        if not problem.startswith(UNREACHABLE_ERROR) or time.monotonic() > until:
            raise BadConfiguration(f"Dagster can't load the asset graph: {problem[:600]}")
        time.sleep(0.5)


def find_definitions_problem(settings: Settings) -> str | None:
    """Return in one line why Dagster has no asset graph; None if it has one."""
    errors = "locationEntries { locationOrLoadError { ... on PythonError { message } } }"
    query = f"{{ workspaceOrError {{ ... on Workspace {{ {errors} }} }} }}"
    request = urllib.request.Request(
        f"{settings.dagster_url}/graphql",
        data=json.dumps({"query": query}).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with DIRECT_OPENER.open(request, timeout=60) as response:
            entries = json.load(response)["data"]["workspaceOrError"]["locationEntries"]
    except OSError as error:
        return f"dagster-webserver does not answer: {error}"
    messages = [(entry["locationOrLoadError"] or {}).get("message") for entry in entries]
    return next((" ".join(message.split()) for message in messages if message), None)


def launch_service(service: Service, folder: Path, env: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with lock_folder(folder) as descriptor, default_sigint():
        if descriptor is not None:
            start_detached(service.command, folder, descriptor, cwd=SOURCE, env={**env, **service.env})


@contextmanager
def default_sigint() -> Iterator[None]:
    """Restore the default SIGINT for processes that are started in this block.

    A background process of a shell ignores SIGINT, and so do its children. Dagster handles SIGTERM like SIGINT, so its code
    server ended only by SIGKILL after the grace period.
    """
    ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    if ignored:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def check_port(service: Service) -> None:
    if service.port is None:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", service.port))
        except OSError:
            raise BadConfiguration(
                f"port {service.port} for {service.name} is in use by another program: end it, or set {service.variable}"
            ) from None


def is_ready(service: Service) -> bool:
    """Return whether a service is ready.

    Checked by its health page, else its open port; a service with neither is ready once it runs.
    """
    if service.health:
        try:
            with DIRECT_OPENER.open(service.health, timeout=2) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False
    if service.port is None:
        return True
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", service.port)) == 0


def read_service_log(folder: Path) -> str:
    log = folder / LOG_FILE
    return log.read_text(errors="replace", encoding="utf-8") if log.is_file() else ""


def down(settings: Settings, console: Console) -> None:
    """End everything. Jobs save a checkpoint on SIGTERM, from which `up` resumes them.

    Raises:
        BadConfiguration: the kernel does not end some processes, named in the message. Everything else has ended.
    """
    if not settings.home.is_dir():
        return
    # No lock on a file system that became read-only, as after a disk error: nothing can be started there.
    with exclusive_access(settings, console) if os.access(settings.home, os.W_OK) else nullcontext():
        remaining = stop_all(settings, console)
    if remaining:
        raise BadConfiguration(
            f"{', '.join(remaining)}: not ended by SIGKILL within {KILL_SECONDS:.0f} s, probably because the process "
            "waits in the kernel "
            "for an unresponsive disk or device: run `hanzo-ml down` again once it responds, or restart the machine"
        )


def stop_all(settings: Settings, console: Console) -> list[str]:
    """End all services, run workers and jobs; return what could not be ended."""
    # End the daemon first and wait for it: it could start another run worker, and that one a job, which would be missed.
    remaining = stop_processes([("dagster-daemon", service_folder(settings, "dagster-daemon"), GRACE_SECONDS)], console)
    until = time.monotonic() + KILL_SECONDS
    for worker in settings.run_workers.glob("*"):
        # A run worker that gets SIGTERM reports its run as cancelled, which is final. A killed one is retried.
        if not kill_process(worker, max(until - time.monotonic(), 0.0)):
            remaining.append(f"run worker {worker.name} (process {read_pid(worker)})")
    for path in settings.run_workers.glob("*"):
        kill_orphans(path)
    jobs = settings.home / "jobs"
    # Search no deeper: a user's command may create files of any name below its own folder.
    locks = [*jobs.glob("*/lock"), *jobs.glob("*/*/lock")]
    running = [path.parent for path in locks if is_running(path.parent)]
    ending = [(f"job {job.relative_to(jobs)}", job, JOB_GRACE_SECONDS) for job in running]
    ending += [(each.name, service_folder(settings, each.name), GRACE_SECONDS) for each in reversed(list_services(settings))]
    return list(dict.fromkeys([*remaining, *stop_processes(ending, console)]))  # the daemon may be among both


def stop_processes(named: Sequence[tuple[str, Path, float]], console: Console) -> list[str]:
    """End processes concurrently; return those that could not be ended.

    Each is given by name, folder of its lock, and grace period.
    """
    remaining = []
    ending = [each for each in named if is_running(each[1])]
    for _, folder, _ in ending:
        send_signal(folder, signal.SIGTERM)
    for name, folder, grace in ending:
        with console.status(f"ending {name}"):
            has_ended = stop_process(folder, grace, KILL_SECONDS)
        console.print(f"  {name} {'ended' if has_ended else 'could not be ended'}")
        if not has_ended:
            remaining.append(f"{name} (process {read_pid(folder)})")
    return remaining


def status(settings: Settings, console: Console) -> None:
    """Print which services run and answer."""
    for service in list_services(settings):
        running = is_running(service_folder(settings, service.name))
        state = "running" if running and is_ready(service) else "starting or stuck" if running else "not running"
        console.print(f"  {service.name:<18} {state}")
    if service_folder(
        settings, ""
    ).is_dir():  # otherwise nothing was ever started, and the check would create the store's folders
        print_store_problem(settings, console)


def main() -> None:
    """`python -m resources.stack.lifecycle up|down|status`."""
    actions: dict[str, Callable[[Settings, Console], None]] = {"up": up, "down": down, "status": status}
    console = Console(highlight=False)
    try:
        settings = Settings.load()
        try:
            actions[sys.argv[1]](settings, console)
        except OSError as error:
            raise home_folder_error(error) from None
    except BadConfiguration as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_CONFIGURATION)
    if sys.argv[1] == "up":
        console.print(f"Dagster  {settings.dagster_url}\nTracking {settings.tracking_uri}\nEngine   {settings.engine_url}")


if __name__ == "__main__":
    main()
