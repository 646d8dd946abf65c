"""Processes of the embedded stack: commands, ports and dependencies."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from resources.installation import CHECKOUT, SOURCE, WORKSPACE_FILE
from resources.settings.sections import DAGSTER_PREFIX, is_loopback
from resources.settings.settings import Settings

CONTROLLER = "resources.compute.kubernetes.controller"
LOOPBACK_HOSTS = ("127.0.0.1", "localhost")
ALL_INTERFACES = "0.0.0.0"


@dataclass(frozen=True)
class Service:
    """One process of the stack.

    `variable` is the environment variable that sets its port; `after` are the services on which it depends.
    """

    name: str
    command: tuple[str, ...]
    port: int | None = None
    variable: str = ""
    health: str = ""
    after: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)


def list_services(settings: Settings) -> list[Service]:
    """Return the services in the order in which they start."""
    python, dagster = sys.executable, settings.dagster
    level, form = settings.logging.level, settings.logging.format
    logs = ("--log-level", level, "--log-format", form)
    # Dagster calls its text format `colored`; its webserver has another option for the level of Dagster's own log.
    dagster_form = ("--log-format", "json" if form == "json" else "colored")
    dagster_logs = ("--log-level", level, *dagster_form)
    web_logs = ("--dagster-log-level", level, *dagster_form)
    workspace = str(SOURCE / WORKSPACE_FILE)
    code_server_port = str(dagster.code_server_port)
    state_folder = str(settings.home / "engine")
    gateway = (python, "-m", "resources.serving.gateway", "--port", str(settings.engine.port), "--state-dir", state_folder)
    on_cluster = settings.scheduler.backend == "kubernetes"
    # The API then serves the UI below its own address, behind its sign-in.
    path_prefix = ("--path-prefix", DAGSTER_PREFIX) if dagster.url else ()
    return [
        Service(
            "api",
            (python, "-m", "api.server"),
            settings.server.port,
            "HANZO_ML_SERVER_PORT",
            f"{settings.tracking_uri}/health",
        ),
        Service(
            "engine",
            (python, "-m", "resources.serving.replica") if settings.engine.mode == "pull" else (*gateway, *logs),
            settings.engine.port,
            "HANZO_ML_ENGINE_PORT",
            f"{settings.engine_url}/health",
        ),
        Service(
            "code-server",
            # Not `dagster code-server start`: that is a proxy, which keeps running when its own server dies.
            (
                python,
                "-m",
                "dagster",
                "api",
                "grpc",
                "-m",
                "hanzo_ml_assets.definitions",
                "-h",
                # In a pod listen on all interfaces: the host is the name of a Service, not the pod's address.
                dagster.code_server_host if is_loopback(dagster.code_server_host) else ALL_INTERFACES,
                "-p",
                code_server_port,
                *dagster_logs,
            ),
            dagster.code_server_port,
            "HANZO_ML_DAGSTER_CODE_SERVER_PORT",
        ),
        Service(
            "dagster-daemon",
            (python, "-m", "resources.orchestration.daemon", "run", "-w", workspace, *dagster_logs),
            after=("code-server",),
        ),
        Service(
            "dagster-webserver",
            (
                python,
                "-m",
                "dagster_webserver",
                "-w",
                workspace,
                "-h",
                dagster.host,
                "-p",
                str(dagster.port),
                *web_logs,
                *path_prefix,
            ),
            dagster.port,
            "HANZO_ML_DAGSTER_PORT",
            f"{settings.dagster_url}/server_info",
            after=("code-server",),
        ),
        *([Service("relay", (python, "-m", "resources.outbox_relay"))] if settings.stream.brokers else []),
        *([Service("controller", (python, "-m", CONTROLLER))] if on_cluster else []),
    ]


def proxy_exemptions(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables that exempt loopback hosts from the machine's HTTP proxy.

    The stack's processes and their jobs call each other directly; other clients (MLflow, gRPC, pip) still use the proxy.
    """
    given = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    names = ",".join(dict.fromkeys([*filter(None, given.split(",")), *LOOPBACK_HOSTS]))
    return {"no_proxy": names, "NO_PROXY": names}


def python_path(environ: Mapping[str, str]) -> str:
    """Return PYTHONPATH with a checkout's packages first, then the caller's entries.

    The caller's own objective or a script's imports may be there. Installed packages need no entry: with `site-packages` in
    PYTHONPATH they would shadow modules of the standard library.
    """
    own = str(CHECKOUT) if SOURCE == CHECKOUT else None
    return os.pathsep.join(filter(None, (own, environ.get("PYTHONPATH"))))


def service_environment(settings: Settings) -> dict[str, str]:
    """Return variables of every process of the stack, added to the caller's environment."""
    return {
        "HANZO_ML_HOME": str(settings.home),
        "DAGSTER_HOME": str(settings.dagster_home),
        "DAGSTER_RUN_WORKERS": str(settings.run_workers),
        "DAGSTER_CODE_SERVER_HOST": settings.dagster.code_server_host,
        "DAGSTER_CODE_SERVER_PORT": str(settings.dagster.code_server_port),
        "PYTHONPATH": python_path(os.environ),
        "PYTHONUTF8": "1",  # libraries read and write files in the encoding of the locale
        **proxy_exemptions(os.environ),
        # Jobs are children of these processes and see no settings: they get the object store's keys from here.
        **settings.storage.variables,
    }
