"""Create and delete a job's objects in a crash-safe order.

The ConfigMap is created first and deleted last: if any object of a generation exists, its ConfigMap does too. So the
controller need not watch Secrets and needs no permission to read them.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from resources.compute.kubernetes.cluster import (
    CONFIG_MAP,
    COSCHEDULING_GROUP,
    JOB,
    JOB_SET,
    NETWORK_POLICY,
    SECRET,
    SERVICE,
    VOLCANO_GROUP,
    AlreadyExists,
    Cluster,
    ClusterUnavailable,
    InvalidObject,
    Item,
    Kind,
    NotFound,
    RequestDenied,
    find_kind,
)
from resources.compute.kubernetes.gang import DIGEST_ANNOTATION, GENERATION_ANNOTATION
from resources.compute.kubernetes.phases import INVALID_CHILD
from resources.compute.kubernetes.states import GangState
from resources.compute.kubernetes.token_secret import KEY, token_name
from resources.settings.scheduler import Scheduler

log = logging.getLogger(__name__)

IDENTITY = (DIGEST_ANNOTATION, GENERATION_ANNOTATION)
"""Annotations that are equal for objects of the same work and generation."""


GANG_KINDS: dict[str, tuple[Kind, ...]] = {
    "kueue": (JOB_SET,),
    "indexed_job": (JOB, SERVICE),
    "coscheduling": (JOB_SET, COSCHEDULING_GROUP),
    "volcano": (JOB_SET, VOLCANO_GROUP),
}
"""Kinds that each gang backend creates for a job; the first owns the pods."""


def created_kinds(scheduler: Scheduler) -> tuple[Kind, ...]:
    """Return the kinds that a job may have in addition to ConfigMap and Secret."""
    return (*GANG_KINDS[scheduler.gang_backend], *([NETWORK_POLICY] if scheduler.namespace_per_organization else []))


@dataclass(frozen=True)
class Created:
    """Created objects of a generation, without its Secret.

    `secret_existed`: the Secret existed before and keeps its token.
    """

    items: Sequence[Item]
    secret_existed: bool


def create_objects(cluster: Cluster, items: Sequence[Item], token: str) -> Created:
    """Create the missing objects of a job's generation (idempotent).

    Nothing is created if the API server would reject the pods' Job.

    Raises:
        InvalidObject: an object is rejected, or its name belongs to other work.
        RequestDenied: the installation does not allow it.
        ClusterUnavailable: no answer, or an object of that name is still being deleted.
    """
    found, secret_existed = [], False
    for item in items:
        if item["kind"] == JOB_SET.name:
            check_child(cluster, item)
    for item in items:
        if item["kind"] == SECRET.name:
            secret_existed = not create_secret(cluster, item, token)
        else:
            found.append(create_or_attach(cluster, item))
    return Created(found, secret_existed)


def create_secret(cluster: Cluster, item: Item, token: str) -> bool:
    """Create the Secret with a token of the job.

    Return False if one exists: it is kept, because pods may have read it.
    """
    try:
        cluster.create(item | {"stringData": {KEY: token}})
    except AlreadyExists:
        return False
    return True


def check_child(cluster: Cluster, job_set: Item) -> None:
    """Have the API server validate the Job that a JobSet will create.

    It accepts JobSets whose Job it then rejects: they would never create a pod.

    Raises:
        InvalidObject: the Job is rejected; the message is the API server's.
        ClusterUnavailable: no answer.
    """
    for replicated in job_set["spec"]["replicatedJobs"]:
        template, metadata = replicated["template"], job_set["metadata"]
        child = {
            "apiVersion": JOB.api_version,
            "kind": JOB.name,
            "metadata": {
                **template["metadata"],
                "name": f"{metadata['name']}-{replicated['name']}-0",
                "namespace": metadata["namespace"],
            },
            "spec": template["spec"],
        }
        try:
            cluster.create(child, dry_run=True)
        except InvalidObject as problem:
            # A webhook's denial because the parent is missing may pass later.
            if INVALID_CHILD.search(str(problem)):
                raise
        except (AlreadyExists, RequestDenied) as problem:
            log.info("Job %s cannot be checked: %s", child["metadata"]["name"], problem)


def create_or_attach(cluster: Cluster, item: Item) -> Item:
    """Create an object, or return the existing one of an interrupted creation."""
    metadata = item["metadata"]
    try:
        return cluster.create(item)
    except AlreadyExists:
        pass
    kind = find_kind(item)
    try:
        found = cluster.read(kind, metadata["namespace"], metadata["name"])
    except NotFound:
        raise ClusterUnavailable(f"{kind.name} {metadata['name']} was just deleted") from None
    if "deletionTimestamp" in found["metadata"]:
        raise ClusterUnavailable(f"{kind.name} {metadata['name']} is being deleted")
    theirs = found["metadata"].get("annotations") or {}
    if any(theirs.get(name) != metadata["annotations"][name] for name in IDENTITY):
        command = f"kubectl -n {metadata['namespace']} delete {kind.plural} {metadata['name']}"
        raise InvalidObject(f"{kind.name} {metadata['name']} exists and belongs to other work: delete it with `{command}`")
    return found


def delete_gang(cluster: Cluster, gang: GangState, scheduler: Scheduler) -> None:
    """Delete the owner of a generation's pods; they end within their grace period."""
    cluster.delete(GANG_KINDS[scheduler.gang_backend][0], gang.namespace, gang.name, uid=gang.uid)


def delete_rest(cluster: Cluster, config_map: Item, scheduler: Scheduler) -> None:
    """Delete the remaining objects of a generation whose pods are gone, ConfigMap last.

    They are deleted by name, because Secrets may not be read: the names of other generations differ.
    """
    namespace, name = place(config_map)
    for kind in created_kinds(scheduler):
        cluster.delete(kind, namespace, name)
    cluster.delete(SECRET, namespace, token_name(name))
    cluster.delete(CONFIG_MAP, namespace, name, uid=config_map["metadata"].get("uid"))


def place(item: Item) -> tuple[str, str]:
    """Return namespace and name of an object."""
    return item["metadata"]["namespace"], item["metadata"]["name"]
