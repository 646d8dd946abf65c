"""Kubernetes namespaces of the jobs of organizations."""

import hashlib
import re

from resources.metadata.tracking.experiments import DEFAULT_ORGANIZATION
from resources.settings.scheduler import Scheduler

MAX_CHARACTERS = 63
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
"""RFC 1123 label, which names of namespaces must be."""
HASH_CHARACTERS = 16
HASHED = re.compile(rf"-[0-9a-f]{{{HASH_CHARACTERS}}}$")


def organization_namespace(scheduler: Scheduler, organization: str) -> str:
    """Return the namespace of an organization's jobs, unique per organization.

    An organization whose name is no DNS label gets a short form and a hash. So does one whose name looks like that,
    otherwise it could get another's namespace.
    """
    if organization == DEFAULT_ORGANIZATION or not scheduler.namespace_per_organization:
        return scheduler.namespace
    name = f"{scheduler.namespace}-{organization}"
    if len(name) <= MAX_CHARACTERS and LABEL.fullmatch(organization) and not HASHED.search(name):
        return name
    digest = hashlib.sha256(organization.encode()).hexdigest()[:HASH_CHARACTERS]
    room = MAX_CHARACTERS - len(scheduler.namespace) - len(digest) - 2
    readable = re.sub(r"[^a-z0-9]+", "-", organization.lower()).strip("-")[:room].rstrip("-")
    return "-".join(filter(None, (scheduler.namespace, readable, digest)))
