"""A minimal `kubectl kustomize`, so that tests need no kubectl.

It covers what deploy/kubernetes uses; a test on a cluster compares the two.
"""

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
FOLDERS = {"base": KUBERNETES, **{folder.name: folder for folder in sorted((KUBERNETES / "overlays").iterdir())}}
"""Folders that an administrator may apply, by name."""
Item = dict[str, Any]


def render(folder: Path) -> list[Item]:
    """Return all objects of a kustomization.

    ConfigMaps are generated, and patches of containers and volumes are merged by name.
    """
    document = yaml.safe_load((folder / "kustomization.yaml").read_text())
    objects: list[Item] = []
    for name in (*document.get("resources", ()), *document.get("components", ())):
        place = folder / name
        objects += render(place) if place.is_dir() else list(yaml.safe_load_all(place.read_text()))
    for generator in document.get("configMapGenerator", ()):
        metadata = {"name": generator["name"], "namespace": generator["namespace"]}
        data = {name: (folder / name).read_text() for name in generator["files"]}
        if generator.get("behavior") == "replace":
            [replaced] = [item for item in objects if (item["kind"], item["metadata"]) == ("ConfigMap", metadata)]
            objects.remove(replaced)
        objects.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    for replicas in document.get("replicas", ()):
        find(objects, "Deployment", replicas["name"])["spec"]["replicas"] = replicas["count"]
    for patch in document.get("patches", ()):
        change = yaml.safe_load((folder / patch["path"]).read_text())
        target = find(objects, change["kind"], change["metadata"]["name"])["spec"]["template"]["spec"]
        for key, items in change["spec"]["template"]["spec"].items():
            assert not {item["name"] for item in items} & {item["name"] for item in target[key]}
            target[key] += items
    return objects


def find(objects: list[Item], kind: str, name: str) -> Item:
    [found] = [item for item in objects if (item["kind"], item["metadata"]["name"]) == (kind, name)]
    return found
