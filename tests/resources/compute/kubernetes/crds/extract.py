"""Extract the schemas in this folder from their projects' CRDs: `python extract.py`.

Needs Go and its module proxy. Omitted are descriptions, which are most of the size, and the Job inside a JobSet, which
is checked against Kubernetes' own schema. The proxy does not serve the Coscheduling module:
`podgroups.scheduling.x-k8s.io.json` is written by hand from the reference of scheduler-plugins v0.34.7.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import yaml

SOURCES = {
    "sigs.k8s.io/jobset@v0.12.0": ["config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml"],
    "sigs.k8s.io/kueue@v0.19.2": [
        f"config/components/crd/bases/kueue.x-k8s.io_{plural}.yaml"
        for plural in ("clusterqueues", "localqueues", "resourceflavors", "workloadpriorityclasses")
    ],
    "volcano.sh/volcano@v1.15.1": ["config/crd/volcano/bases/scheduling.volcano.sh_podgroups.yaml"],
}


def module_folder(module: str) -> Path:
    answer = subprocess.run(["go", "mod", "download", "-json", module], capture_output=True, check=True, cwd="/")
    return Path(json.loads(answer.stdout)["Dir"])


def prune(schema: Any) -> Any:
    if isinstance(schema, list):
        return [prune(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: prune(value) for key, value in schema.items() if not (key == "description" and isinstance(value, str))}


def main() -> None:
    for module, files in SOURCES.items():
        for file in files:
            definition = yaml.safe_load((module_folder(module) / file).read_text())
            [version] = [each for each in definition["spec"]["versions"] if each["storage"]]
            schema = prune(version["schema"]["openAPIV3Schema"])
            schema["properties"].pop("status", None)
            if definition["spec"]["names"]["kind"] == "JobSet":
                job = schema["properties"]["spec"]["properties"]["replicatedJobs"]["items"]["properties"]["template"]
                job["properties"]["spec"] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
            found = {
                "source": f"{module} {file}",
                "apiVersion": f"{definition['spec']['group']}/{version['name']}",
                "kind": definition["spec"]["names"]["kind"],
                "schema": schema,
            }
            target = Path(__file__).parent / f"{definition['metadata']['name']}.json"
            target.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
