"""llama.cpp's server on loopback, until stdin closes: `python -m recipes.export.probe_server GGUF`."""

import os
import sys


def main(gguf: str) -> None:
    import xllamacpp

    # llama.cpp also logs to standard output: only the address may reach the pipe.
    pipe = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    parameters = xllamacpp.CommonParams()
    parameters.model.path = gguf
    parameters.n_ctx = 512
    parameters.n_parallel = parameters.cpuparams.n_threads = 1
    parameters.warmup = parameters.ui = False
    parameters.verbosity = 1
    server = xllamacpp.Server(parameters)
    print(server.listening_address, file=pipe, flush=True)
    sys.stdin.read()
    os._exit(0)  # the server's own shutdown sometimes hangs


if __name__ == "__main__":
    main(sys.argv[1])
