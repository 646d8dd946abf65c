"""Small GGUF models, and load on a serving gateway."""

import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpx
import numpy as np
import pytest
from gguf import GGUFReader

from recipes.export.gguf import export_gguf
from recipes.storage.artifact_store import hash_file
from tests.recipes.tiny_model import make_tiny_model

PROMPTS = ("Who keeps the lamp?", "What is the harbour called?")


@dataclass(frozen=True)
class Model:
    """A GGUF file and its checksum."""

    path: Path
    sha256: str


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Model]:
    """Two models that answer differently."""
    folder = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        export_gguf(make_tiny_model(folder / f"hf-{seed}", seed), folder / f"{seed}.gguf", "F16")
    return [Model(folder / f"{seed}.gguf", hash_file(folder / f"{seed}.gguf")) for seed in (0, 1)]


def broken(model: Model, target: Path) -> Model:
    """Copy a model with NaN in its last norm: it loads, but computes nothing."""
    shutil.copy(model.path, target)
    reader = GGUFReader(target, "r+")
    for tensor in reader.tensors:
        if tensor.name == "output_norm.weight":
            tensor.data[:] = np.nan
    reader.data.flush()
    return Model(target, hash_file(target))


class HasUrl(Protocol):
    """An engine that answers at a URL."""

    url: str


class Load:
    """Send requests continuously from several threads; `failures` are the errors users would see."""

    def __init__(self, gateway: HasUrl, streams: bool = False) -> None:
        self.url = f"{gateway.url}/v1/chat/completions"
        self.streams = streams
        self.failures: list[str] = []
        self.versions: list[str] = []
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(3)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def has_met(self, version: int) -> bool:
        return str(version) in self.versions or bool(self.failures)

    def _ask(self) -> None:
        body = {
            "model": "keeper",
            "messages": [{"role": "user", "content": "Who?"}],
            "max_tokens": 24,
            "stream": self.streams,
        }
        http = httpx.Client(timeout=60)
        while not self._stopped.is_set():
            try:
                answer = http.post(self.url, json=body)
                whole = answer.text.rstrip().endswith("data: [DONE]") if self.streams else "choices" in answer.json()
                if answer.status_code != 200 or not whole:
                    self.failures.append(answer.text)
                self.versions.append(answer.headers["X-Hanzo-Model-Version"])
            except (httpx.HTTPError, ValueError, KeyError) as error:
                self.failures.append(repr(error))
