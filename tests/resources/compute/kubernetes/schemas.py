"""Validate objects as the API server would.

The schemas are strict: those of Kubernetes' own kinds and of the CRDs in `crds/`.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jsonschema import validate as validate_json
from kubernetes_validate import validate

VERSION = "1.36"
CRDS = [json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "crds").glob("*.json"))]
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""A DNS-1123 label."""


def check(item: Mapping[str, Any]) -> None:
    """Raise ValidationError or AssertionError if the API server would refuse the object."""
    assert LABEL.fullmatch(item["metadata"]["name"])
    schemas = [crd["schema"] for crd in CRDS if (crd["apiVersion"], crd["kind"]) == (item["apiVersion"], item["kind"])]
    for schema in schemas:
        validate_json(dict(item), forbid_unknown_keys(schema))
    if not schemas:
        validate(dict(item), VERSION, strict=True)
    if item["kind"] == "JobSet":
        check_children(item)


def forbid_unknown_keys(schema: Any) -> Any:
    """Reject unknown keys, as `kubectl --validate=strict` does.

    The API server itself would silently drop them.
    """
    if isinstance(schema, list):
        return [forbid_unknown_keys(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: forbid_unknown_keys(value) for key, value in schema.items()}
    if "properties" in schema and "type" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        strict.setdefault("additionalProperties", False)
    return strict


def check_children(job_set: Mapping[str, Any]) -> None:
    """Check the Jobs of a JobSet.

    JobSet accepts templates that the API server then refuses on every attempt.
    """
    for job in job_set["spec"]["replicatedJobs"]:
        template = job["template"]
        child = {"name": f"{job_set['metadata']['name']}-{job['name']}-0", **template["metadata"]}
        check({"apiVersion": "batch/v1", "kind": "Job", "metadata": child, "spec": template["spec"]})
        for rule in template["spec"]["podFailurePolicy"]["rules"]:
            values = rule.get("onExitCodes", {}).get("values", [])
            assert values == sorted(set(values)), "the API server takes exit codes in ascending order alone"
