"""Render a job's Kubernetes objects, as a list and as YAML."""

from typing import Any
from urllib.parse import urlparse

import yaml

from recipes.contracts.job import Job
from resources.compute.kubernetes.gang import plan_gang
from resources.compute.kubernetes.gangs import GANG_BACKENDS
from resources.compute.kubernetes.network_policy import gang_policy
from resources.compute.kubernetes.pod_manifest import job_document
from resources.compute.kubernetes.token_secret import token_secret
from resources.settings.scheduler import Scheduler

LOOPBACK = ("localhost", "127.0.0.1", "::1", "0.0.0.0", "::")
"""Hosts that resolve to the pod itself within a pod."""


def render(
    job: Job, scheduler: Scheduler, generation: int = 1, used_seconds: float = 0, namespace: str | None = None
) -> list[dict[str, Any]]:
    """Return the objects of a job in the order of creation.

    Exactly these are created, except that the token in the Secret is generated at creation and never printed.

    Raises:
        BadConfiguration: the job requests hardware that is not in the settings or cannot be expressed.
    """
    gang = plan_gang(job, scheduler, generation, used_seconds, namespace)
    policies = [gang_policy(gang)] if gang.is_isolated and gang.nodes > 1 and not gang.shares else []
    return [job_document(gang), token_secret(gang), *policies, *GANG_BACKENDS[scheduler.gang_backend](gang)]


def out_of_reach(job: Job, scheduler: Scheduler) -> list[str]:
    """List what the job's pods could not reach, each with the setting to change."""
    api = plan_gang(job, scheduler).api
    if urlparse(api).hostname not in LOOPBACK:
        return []
    return [f"the API at {api}, which within a pod is the pod itself (set scheduler.tracking_uri)"]


class _Dumper(yaml.SafeDumper):
    """Dumper that writes multi-line texts as blocks and never uses aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: _Dumper, value: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def to_yaml(objects: list[dict[str, Any]]) -> str:
    """Return one YAML document per object, with keys in insertion order."""
    return "".join("---\n" + yaml.dump(item, Dumper=_Dumper, sort_keys=False, width=1000) for item in objects)
