"""Whether the API server would take an object: strict schemas for what is Kubernetes' own, the keys for a JobSet."""

import re
from collections.abc import Mapping
from typing import Any

from kubernetes_validate import validate

VERSION = "1.36"
JOB_SET_KEYS = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {
        "replicatedJobs", "network", "successPolicy", "failurePolicy", "startupPolicy", "suspend", "coordinator",
        "managedBy", "ttlSecondsAfterFinished",
    },
    "network": {"enableDNSHostnames", "subdomain", "publishNotReadyAddresses"},
    "failurePolicy": {"maxRestarts", "restartStrategy", "rules"},
    "rule": {"name", "action", "onJobFailureReasons", "onJobFailureMessagePatterns", "targetReplicatedJobs"},
    "replicatedJob": {"name", "groupName", "replicas", "template", "dependsOn"},
}  # fmt: skip
"""Of jobset.x-k8s.io/v1alpha2, from its reference (v0.12)."""
ACTIONS = {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"}
RULE_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""A DNS-1123 label."""


def check(item: Mapping[str, Any]) -> None:
    """Raises ValidationError or AssertionError where the API server would refuse the object."""
    assert LABEL.fullmatch(item["metadata"]["name"])
    if item["kind"] == "JobSet":
        check_job_set(item)
    else:
        validate(dict(item), VERSION, strict=True)


def check_job_set(item: Mapping[str, Any]) -> None:
    assert item["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    spec = item["spec"]
    rules = spec["failurePolicy"]["rules"]
    for place, found in (
        ("", [item]),
        ("spec", [spec]),
        ("network", [spec["network"]]),
        ("failurePolicy", [spec["failurePolicy"]]),
        ("rule", rules),
        ("replicatedJob", spec["replicatedJobs"]),
    ):
        for mapping in found:
            assert set(mapping) <= JOB_SET_KEYS[place], place
    for rule in rules:
        assert rule["action"] in ACTIONS and RULE_NAME.fullmatch(rule["name"])
    for job in spec["replicatedJobs"]:
        template = job["template"]
        assert set(template) <= {"metadata", "spec"}
        child = {"name": f"{item['metadata']['name']}-{job['name']}-0", **template["metadata"]}
        check({"apiVersion": "batch/v1", "kind": "Job", "metadata": child, "spec": template["spec"]})
