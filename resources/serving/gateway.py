"""`python -m resources.serving.gateway`: the long-lived process of the local inference engine, on loopback only.

Takes its port and its state folder, or says in one line why not; the endpoints are `resources.engine.app`.
"""

import argparse
import errno
import logging
import socket
import sys
from pathlib import Path

import uvicorn

from recipes.contracts.job import EXIT_BAD_CONFIGURATION, BadConfiguration
from resources.engine.app import make_app
from resources.engine.state import State

HOST = "127.0.0.1"
SHUTDOWN_SECONDS = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8043)
    parser.add_argument("--state-dir", type=Path, required=True, help="folder that remembers what is deployed")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        listener = listen(arguments.port)
        state = State(arguments.state_dir)
        state.read()  # a broken file is found before anything is served
    except BadConfiguration as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_CONFIGURATION)
    config = uvicorn.Config(
        make_app(state), log_level="warning", access_log=False, timeout_graceful_shutdown=SHUTDOWN_SECONDS
    )
    print(f"engine listens on http://{HOST}:{arguments.port}", flush=True)
    uvicorn.Server(config).run(sockets=[listener])


def listen(port: int) -> socket.socket:
    """Take the port; raises BadConfiguration when another process has it."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart need not wait for old connections
    try:
        listener.bind((HOST, port))
        listener.listen()  # before uvicorn does, because only a port that listens is taken
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise BadConfiguration(f"port {port} is in use: end the process that has it, or choose another port") from None
        raise BadConfiguration(f"cannot listen on port {port}: {error}") from None
    return listener


if __name__ == "__main__":
    main()
