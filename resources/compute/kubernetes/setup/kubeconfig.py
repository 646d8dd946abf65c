"""Find the kubeconfig file for commands that prepare a cluster."""

from pathlib import Path

from resources.settings.scheduler import Scheduler


def find_kubeconfig(given: str | None, scheduler: Scheduler) -> str | None:
    """Return the given, configured, or kubectl's default kubeconfig; None in a pod."""
    return given or scheduler.kubeconfig or default_kubeconfig()


def find_administrator_kubeconfig(given: str | None, scheduler: Scheduler) -> str | None:
    """Return the kubeconfig of an administrator.

    Like `find_kubeconfig`, but prefers the caller's to the configured one, which may only be permitted to run jobs.
    """
    return given or default_kubeconfig() or scheduler.kubeconfig


def default_kubeconfig() -> str | None:
    """Return kubectl's default kubeconfig; None if it does not exist."""
    from kubernetes.config.kube_config import KUBE_CONFIG_DEFAULT_LOCATION

    usual = Path(KUBE_CONFIG_DEFAULT_LOCATION).expanduser()
    return str(usual) if usual.is_file() else None
