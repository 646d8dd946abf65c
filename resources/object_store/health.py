"""Check the object store, and name the setting to change if there is a problem."""

import os
from concurrent.futures import Future, TimeoutError
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

from recipes.storage import uris
from recipes.storage.artifact_store import Store

PROBE_URIS = tuple(f"{root}/ready" for root in (uris.DATASETS, uris.RUNS, uris.MODELS))
"""One name in each bucket. No object needs to exist there: the check is that the bucket answers."""
TIMEOUT_SECONDS = 5.0


def find_store_problem(store: Store) -> str | None:
    """Return why the store cannot be used, or None.

    Without an answer, the requests take minutes.
    """
    for uri in PROBE_URIS:
        try:
            store.list(uri)
            local = store.local_path(uri)
        except Exception as error:  # any error of the store's library means that it does not answer
            return str(error).removeprefix(f"{uri}: ")
        bucket = None if local is None else bucket_folder(local, uri)
        if bucket is not None and not (bucket.is_dir() and os.access(bucket, os.W_OK)):
            return f"{bucket} is not a writable folder"
    return None


def bucket_folder(local: Path, uri: str) -> Path:
    """Return the folder that represents the bucket of `uri`.

    The parent of all parts of its key.
    """
    return local.parents[urlsplit(uri).path.count("/") - 1]


def find_store_problem_in_time(store: Store, seconds: float = TIMEOUT_SECONDS) -> str | None:
    """Return the same within `seconds`."""
    pending: Future[str | None] = Future()
    # A daemon thread: the process can end without an answer.
    Thread(target=lambda: pending.set_result(find_store_problem(store)), daemon=True).start()
    try:
        return pending.result(seconds)
    except TimeoutError:
        return f"{store.address.root} has not answered for {seconds:.0f} s (setting storage.endpoint)"
