"""Read facts about a cluster from its API server, for `hanzo-ml cluster check`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.contracts.job import Hardware, Job, Program, StoreAddress
from recipes.storage import uris
from resources.compute.kubernetes.cluster import (
    NODE,
    Cluster,
    ClusterError,
    ClusterUnavailable,
    InvalidObject,
    Item,
    Kind,
    NotFound,
    RequestDenied,
)
from resources.compute.kubernetes.job_manifest import render
from resources.compute.kubernetes.setup.kinds import CLAIM, NAMESPACE, SECRET, setup_kind
from resources.compute.kubernetes.setup.permissions import Permission, required_permissions
from resources.settings.scheduler import Scheduler

API_VERSIONS = {
    "kueue": ("jobset.x-k8s.io/v1alpha2", "kueue.x-k8s.io/v1beta2"),
    "indexed_job": (),
    "coscheduling": ("jobset.x-k8s.io/v1alpha2", "scheduling.x-k8s.io/v1alpha1"),
    "volcano": ("jobset.x-k8s.io/v1alpha2", "scheduling.volcano.sh/v1beta1"),
}
"""API versions that each gang backend requires."""
UNKNOWN = "unknown"
"""Phase of a claim that may not be read."""


@dataclass(frozen=True)
class ClusterFacts:
    """Input of the check.

    Objects by kind and name are None if they do not exist.

    Args:
        nodes: nodes of the cluster; None if this identity may not list them.
        claims: phase by name; empty for a claim that does not exist.
        unreadable: objects that this identity may not read.
        refused: why the API server rejects the objects of a small job; empty if it accepts them.
    """

    version: str
    namespace_exists: bool
    missing_apis: tuple[str, ...]
    denied: tuple[tuple[Permission, str], ...]
    nodes: Sequence[Item] | None
    queues: Mapping[tuple[str, str], Item | None]
    secrets: Mapping[str, bool]
    claims: Mapping[str, str]
    unreadable: tuple[str, ...]
    refused: str


class FactReader:
    """Reader of the facts, which records and skips what this identity may not read."""

    def __init__(self, cluster: Cluster, scheduler: Scheduler) -> None:
        self._cluster = cluster
        self._scheduler = scheduler
        self._unreadable: list[str] = []

    def read(self, wanted: Sequence[Item]) -> ClusterFacts:
        """Return the facts; `wanted` are the configured queues and classes.

        Raises:
            ClusterUnavailable: the API server does not answer.
        """
        version = str(self._cluster.request("GET", "/version")["gitVersion"])
        namespace = self._find(NAMESPACE, self._scheduler.namespace)
        missing = tuple(each for each in API_VERSIONS[self._scheduler.gang_backend] if not self._serves(each))
        claims = self._read_claims()
        secrets = self._read_secrets()
        return ClusterFacts(
            version=version,
            namespace_exists=namespace is not None,
            missing_apis=missing,
            denied=tuple(self._denied()),
            nodes=self._read_nodes(),
            queues={(item["kind"], item["metadata"]["name"]): self._find_item(item) for item in wanted},
            secrets=secrets,
            claims=claims,
            unreadable=tuple(self._unreadable),
            refused="" if missing or namespace is None else self._try_job(),
        )

    def _serves(self, api_version: str) -> bool:
        try:
            self._cluster.request("GET", f"/apis/{api_version}")
        except NotFound:
            return False
        return True

    def _find(self, kind: Kind, name: str) -> Item | None:
        """Return an object, or an empty one if it may not be read."""
        try:
            return self._cluster.read(kind, self._scheduler.namespace, name)
        except NotFound:
            return None
        except RequestDenied:
            self._unreadable.append(f"{kind.name} {name}")
            return {}

    def _find_item(self, item: Item) -> Item | None:
        return self._find(setup_kind(item), item["metadata"]["name"])

    def _denied(self) -> list[tuple[Permission, str]]:
        return [
            (each, verb)
            for each in required_permissions(self._scheduler)
            for verb in each.verbs
            if not self._may(each, verb)
        ]

    def _may(self, permission: Permission, verb: str) -> bool:
        resource, _, subresource = permission.resource.partition("/")
        place = {} if permission.cluster_wide else {"namespace": self._scheduler.namespace}
        attributes = {"group": permission.group, "resource": resource, "subresource": subresource, "verb": verb, **place}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        return bool(self._cluster.request("POST", path, body=review)["status"]["allowed"])

    def _read_nodes(self) -> Sequence[Item] | None:
        try:
            return self._cluster.list(NODE)[0]
        except RequestDenied:
            return None

    def _read_secrets(self) -> dict[str, bool]:
        common = (self._scheduler.job_secret,) if self._scheduler.job_secret else ()
        names = dict.fromkeys((*common, *self._scheduler.image_pull_secrets, *self._scheduler.user_secrets))
        return {name: self._find(SECRET, name) is not None for name in names}

    def _read_claims(self) -> dict[str, str]:
        names = dict.fromkeys((*(volume.claim for volume in self._scheduler.volumes), *self._scheduler.user_claims))
        found = {name: self._find(CLAIM, name) for name in names}
        return {name: "" if item is None else item.get("status", {}).get("phase", UNKNOWN) for name, item in found.items()}

    def _try_job(self) -> str:
        """Have the API server validate the objects of a job, webhooks included (dry run)."""
        try:
            for item in render(sample_job(), self._scheduler):
                self._cluster.create(item, dry_run=True)
        except (InvalidObject, RequestDenied) as refusal:
            return str(refusal)
        except ClusterUnavailable as problem:  # 500 of a webhook that does not answer
            return str(problem)
        except ClusterError:
            pass  # an object of that name exists: an earlier check was killed
        return ""


def sample_job() -> Job:
    """Return a job of one pod, to validate with the API server."""
    store = StoreAddress(root="http://none", buckets={})
    hardware = Hardware(cpu=1, memory="1Gi")
    return Job(
        id="check",
        program=Program.VALIDATE,
        result_uri=uris.program_folder("check", Program.VALIDATE),
        store=store,
        cache_dir="",
        hardware=hardware,
    )


def gpu_count(node: Mapping[str, Any], resource: str) -> int:
    return int(node["status"].get("allocatable", {}).get(resource, 0))
