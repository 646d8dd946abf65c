"""Facts about a logged model, read from its artifact's files."""

import hashlib
import subprocess
from pathlib import Path

import pytest

from resources.registration.model_facts import combined_checksum, find_weights

RUN = "s3://hanzo-ml/runs/r/artifacts"


def below(*names: str) -> list[str]:
    return [f"{RUN}/m/{name}" for name in names]


@pytest.mark.requirement("O1")
def test_topmost_weights_are_those_of_the_model() -> None:
    """MLflow's transformers flavour uses a subfolder, and a trainer's state may hold a deeper copy."""
    files = below(
        "MLmodel", "model/config.json", "model/model.safetensors", "model/old/config.json", "model/old/a.safetensors"
    )
    found = find_weights(f"{RUN}/m", files)
    assert (found.location, found.config) == (f"{RUN}/m/model/model.safetensors", f"{RUN}/m/model/config.json")
    assert find_weights(f"{RUN}/m", below("b.safetensors", "a/a.safetensors")).files == tuple(below("b.safetensors"))
    found = find_weights(f"{RUN}/m.safetensors", [f"{RUN}/m.safetensors"])
    assert (found.location, found.config) == (f"{RUN}/m.safetensors", None)


def test_model_without_known_weights_may_have_a_config() -> None:
    found = find_weights(f"{RUN}/m", below("config.json", "pytorch_model.bin", "deep/config.json"))
    assert (found.files, found.config) == ((), f"{RUN}/m/config.json")


def test_checksum_of_shards_equals_sha256sum_of_their_list(tmp_path: Path) -> None:
    hashes = {}
    for name in ("model-2.safetensors", "model-1.safetensors"):
        (tmp_path / name).write_bytes(name.encode())
        hashes[name] = hashlib.sha256(name.encode()).hexdigest()
    assert find_weights(f"{RUN}/m", [f"{RUN}/m/{name}" for name in hashes]).location == f"{RUN}/m/"
    said = subprocess.run("sha256sum *.safetensors | sha256sum", shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert combined_checksum(hashes) == f"sha256:{said.stdout.split()[0]}"
