"""Which kubeconfig file a command uses that prepares a cluster."""

from pathlib import Path

from resources.settings.scheduler import Scheduler


def find_kubeconfig(given: str | None, scheduler: Scheduler) -> str | None:
    """File that names the cluster: as asked for, as in the settings, or kubectl's own; None in a pod."""
    return given or scheduler.kubeconfig or default_kubeconfig()


def find_administrator_kubeconfig(given: str | None, scheduler: Scheduler) -> str | None:
    """As `find_kubeconfig`, but the caller's own before that of the settings, which may do nothing but run jobs."""
    return given or default_kubeconfig() or scheduler.kubeconfig


def default_kubeconfig() -> str | None:
    """kubectl's own; None where there is none."""
    from kubernetes.config.kube_config import KUBE_CONFIG_DEFAULT_LOCATION

    usual = Path(KUBE_CONFIG_DEFAULT_LOCATION).expanduser()
    return str(usual) if usual.is_file() else None
