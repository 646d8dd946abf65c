"""`python -m resources.serving.llama_server`: one model in one process, llama.cpp's OpenAI-compatible server on loopback.

It prints its address as one JSON line on standard output, and ends with the gateway that started it. The gateway verifies
the file and checks the answers.
"""

import argparse
import ctypes
import json
import os
import signal
import sys
import time

import xllamacpp

PR_SET_PDEATHSIG = 1
PARENT_CHECK_SECONDS = 0.5
PROMPT_CACHE_MIB = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True, help="name that answers carry in their field `model`")
    parser.add_argument("--path", required=True, help="GGUF file")
    parser.add_argument("--parent", required=True, type=int, help="process id of the gateway")
    parser.add_argument("--context", type=int, default=8192, help="tokens that all requests share")
    parser.add_argument("--parallel", type=int, default=4, help="requests that are answered at the same time")
    arguments = parser.parse_args()

    die_with_parent(arguments.parent)
    # llama.cpp logs to standard output too: only the address may reach the pipe, which is read once.
    pipe = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        server = xllamacpp.Server(server_parameters(arguments))
    except RuntimeError as error:
        sys.exit(f"error: llama.cpp does not load {arguments.path}: {error}")
    print(json.dumps({"address": server.listening_address}), file=pipe, flush=True)
    pipe.close()
    while os.getppid() == arguments.parent:
        time.sleep(PARENT_CHECK_SECONDS)


def server_parameters(arguments: argparse.Namespace) -> xllamacpp.CommonParams:
    parameters = xllamacpp.CommonParams()
    parameters.model.path = arguments.path
    parameters.model_alias = {arguments.name}
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = thread_count()
    parameters.n_ctx = arguments.context
    parameters.n_parallel = arguments.parallel
    parameters.kv_unified = True  # one long request may use the context that others do not need
    parameters.cache_ram_mib = PROMPT_CACHE_MIB  # the default of 8 GiB is a laptop's whole memory
    # Copy the weights instead of mapping them: later changes of the file cannot affect the verified weights.
    parameters.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_NONE
    parameters.warmup = False  # the smoke prompts are the warm-up
    parameters.ui = False
    parameters.endpoint_slots = False
    parameters.cors_origins = "http://127.0.0.1"  # the default allows every web page
    parameters.verbosity = 1  # errors: why a file does not load
    return parameters


def thread_count() -> int:
    """Return half the number of cores.

    llama.cpp's threads spin while waiting for each other: if two backends, as in every swap, have more threads than there
    are cores, both become eight times slower (measured on two cores), not twice.
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, cores // 2)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; the main loop checks too."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("error: the gateway is gone")


if __name__ == "__main__":
    main()
