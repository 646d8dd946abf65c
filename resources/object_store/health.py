"""What is wrong with the object store, in one line that names the setting to look at."""

import os
from concurrent.futures import Future, TimeoutError
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

from recipes.storage import uris
from recipes.storage.artifact_store import Store

PROBE_URIS = tuple(f"{root}/ready" for root in (uris.DATASETS, uris.RUNS, uris.MODELS))
"""One name in every bucket. Nothing needs to lie there: that the bucket answers is what is asked."""
TIMEOUT_SECONDS = 5.0


def find_store_problem(store: Store) -> str | None:
    """Why the store cannot be used; none where each bucket answers. One that does not answer is asked for minutes."""
    for uri in PROBE_URIS:
        try:
            store.list(uri)
            local = store.local_path(uri)
        except Exception as error:  # whatever the store's library raises means that it does not answer
            return str(error).removeprefix(f"{uri}: ")
        bucket = None if local is None else bucket_folder(local, uri)
        if bucket is not None and not (bucket.is_dir() and os.access(bucket, os.W_OK)):
            return f"{bucket} is no folder that can be written to"
    return None


def bucket_folder(local: Path, uri: str) -> Path:
    """The folder that stands for the bucket of `uri`: above every part of its key."""
    return local.parents[urlsplit(uri).path.count("/") - 1]


def find_store_problem_in_time(store: Store, seconds: float = TIMEOUT_SECONDS) -> str | None:
    """The same for people who wait."""
    pending: Future[str | None] = Future()
    # A daemon: the end of the process waits for no answer.
    Thread(target=lambda: pending.set_result(find_store_problem(store)), daemon=True).start()
    try:
        return pending.result(seconds)
    except TimeoutError:
        return f"{store.address.root} has given no answer for {seconds:.0f} s (setting storage.endpoint)"
