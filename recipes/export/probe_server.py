"""`python -m recipes.export.probe_server GGUF`: llama.cpp's server on loopback, until its standard input ends."""

import os
import sys


def main(gguf: str) -> None:
    import xllamacpp

    # llama.cpp logs to standard output too: only the address may reach the pipe.
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
    os._exit(0)  # its own end waits for ever now and then


if __name__ == "__main__":
    main(sys.argv[1])
