"""A GGUF file in llama.cpp's own server, for comparison with transformers."""

import json
import subprocess
import sys
import urllib.request
import weakref
from pathlib import Path
from typing import Any

SERVER = """
import sys, xllamacpp
parameters = xllamacpp.CommonParams()
parameters.model.path = sys.argv[1]
parameters.n_ctx = 512
parameters.n_parallel = 1
parameters.cpuparams.n_threads = 1
parameters.warmup = False
parameters.ui = False
parameters.verbosity = -1
server = xllamacpp.Server(parameters)
print("listens", server.listening_address, flush=True)
sys.stdin.read()
"""


class LlamaCpp:
    """llama.cpp in its own process, killed with this object because its shutdown sometimes hangs."""

    def __init__(self, gguf: Path) -> None:
        words = [sys.executable, "-c", SERVER, str(gguf)]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        weakref.finalize(self, end, process)
        assert process.stdout is not None
        said = next(line for line in process.stdout if line.startswith("listens "))
        self._address = said.split()[1]

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self._address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        return json.loads(urllib.request.urlopen(request, timeout=60).read())

    def tokenize(self, text: str) -> list[int]:
        return list(self.post("/tokenize", {"content": text, "add_special": True})["tokens"])

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        body = {"messages": messages, **({"tools": tools} if tools else {})}
        return str(self.post("/apply-template", body)["prompt"])

    def next_logprobs(self, tokens: list[int], vocabulary: int) -> dict[int, float]:
        """Return the log-probability of every vocabulary token as the next one."""
        body = {"prompt": tokens, "n_predict": 1, "n_probs": vocabulary, "temperature": 0}
        best = self.post("/completion", body)["completion_probabilities"][0]["top_logprobs"]
        return {entry["id"]: entry["logprob"] for entry in best}

    def continuation(self, tokens: list[int], length: int) -> list[int]:
        body = {"prompt": tokens, "n_predict": length, "temperature": 0, "return_tokens": True}
        return list(self.post("/completion", body)["tokens"])


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()
