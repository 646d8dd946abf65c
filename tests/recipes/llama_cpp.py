"""A GGUF file in llama.cpp's own server, for comparison with transformers."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import xllamacpp


class LlamaCpp:
    """llama.cpp in this process; it ends with the object."""

    def __init__(self, gguf: Path) -> None:
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(gguf)
        parameters.n_ctx = 512
        parameters.n_parallel = 1
        parameters.cpuparams.n_threads = 1
        parameters.warmup = False
        parameters.ui = False
        parameters.verbosity = -1
        self._server = xllamacpp.Server(parameters)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self._server.listening_address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        return json.loads(urllib.request.urlopen(request, timeout=60).read())

    def tokenize(self, text: str) -> list[int]:
        return list(self.post("/tokenize", {"content": text, "add_special": True})["tokens"])

    def render(self, messages: list[dict[str, str]]) -> str:
        return str(self.post("/apply-template", {"messages": messages})["prompt"])

    def next_logprobs(self, tokens: list[int], vocabulary: int) -> dict[int, float]:
        """Log-probability of every token of the vocabulary as the next one."""
        body = {"prompt": tokens, "n_predict": 1, "n_probs": vocabulary, "temperature": 0}
        best = self.post("/completion", body)["completion_probabilities"][0]["top_logprobs"]
        return {entry["id"]: entry["logprob"] for entry in best}

    def continuation(self, tokens: list[int], length: int) -> list[int]:
        body = {"prompt": tokens, "n_predict": length, "temperature": 0, "return_tokens": True}
        return list(self.post("/completion", body)["tokens"])
