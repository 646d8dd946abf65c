"""The volume with what pods of the job image import, 6 GB.

It has interpreter, locked dependencies and a checkout. Restricted Pod Security forbids volumes of type hostPath, but allows
a claim whose volume has that type.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import Any

CLAIM = "dependencies"


def sources(checkout: Path) -> dict[str, Path]:
    """Return folders of this machine by their names in the volume."""
    return {
        "python": Path(sys.base_prefix).resolve(),
        "site-packages": Path(sysconfig.get_path("purelib")).resolve(),
        "checkout": checkout.resolve(),
    }


def manifests(namespace: str, folder: Path) -> list[dict[str, Any]]:
    """Return a volume over a folder of every node, and a namespace's claim on it."""
    specification: dict[str, Any] = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
    name = f"{CLAIM}-{namespace}"
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name},
            "spec": specification
            | {
                "capacity": {"storage": "10Gi"},
                "hostPath": {"path": str(folder), "type": "Directory"},
                "claimRef": {"namespace": namespace, "name": CLAIM},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": CLAIM, "namespace": namespace},
            "spec": specification | {"resources": {"requests": {"storage": "10Gi"}}, "volumeName": name},
        },
    ]
