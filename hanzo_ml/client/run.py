"""A tracked run, as used by a training script."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from hanzo_ml.client.buffer import MetricBuffer
from hanzo_ml.client.retry import retry_unavailable
from hanzo_ml.client.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mlflow import MlflowClient
    from mlflow.entities import RunInfo

log = logging.getLogger(__name__)

MAX_PARAMS_PER_REQUEST = 100
DRAIN_SECONDS = 300.0
"""How long the end of a run waits for an unavailable server before unsent metrics are lost."""
PROXY_SCHEME = "mlflow-artifacts:/"
"""Prefix of artifact URIs that the server serves itself."""


@dataclass(frozen=True)
class RegisteredVersion:
    """A version of a registered model."""

    name: str
    version: int
    stage: str


class Run:
    """Logs to one run. Metrics are buffered and never block.

    Other calls wait for the server's answer.
    """

    def __init__(self, client: "MlflowClient", tracking_uri: str, run_id: str, on_end: "Callable[[Run], None]") -> None:
        self.id = run_id
        self._client = client
        self._tracking_uri = tracking_uri
        self._on_end = on_end
        self._metrics = MetricBuffer(tracking_uri, run_id)
        self._ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end("FINISHED" if kind is None else "FAILED")

    @property
    def info(self) -> "RunInfo":
        """mlflow's `run.info`, read from the server now."""
        return self._client.get_run(self.id).info

    def log_param(self, key: str, value: Any) -> None:
        self.log_params({key: value})

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Log params, which never change: another value for an existing key raises mlflow's MlflowException."""
        from mlflow.entities import Param

        for part in split_batches(params.items(), MAX_PARAMS_PER_REQUEST):
            self._client.log_batch(self.id, params=[Param(key, str(value)) for key, value in part])

    def log_metric(self, key: str, value: float, step: int | None = None) -> None:
        self._metrics.add(key, value, step or 0)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        now = time.time_ns() // 1_000_000
        for key, value in metrics.items():
            self._metrics.add(key, value, step or 0, now)

    def set_tag(self, key: str, value: Any) -> None:
        self._client.set_tag(self.id, key, value)

    def set_tags(self, tags: Mapping[str, Any]) -> None:
        for key, value in tags.items():
            self.set_tag(key, value)

    def log_artifact(self, key: str, path: str | Path) -> None:
        """Store a file under exactly `key`, or a folder's files below it.

        The order of the arguments is the specification's.
        """
        source = Path(path)
        if not source.exists():
            raise FileNotFoundError(f"no file or folder {source}")
        files = [source] if source.is_file() else sorted(file for file in source.rglob("*") if file.is_file())
        names = [key if source.is_file() else f"{key}/{file.relative_to(source).as_posix()}" for file in files]
        place = str(self.info.artifact_uri)
        if not place.startswith(PROXY_SCHEME):  # the experiment's clients write to its own location, as mlflow does
            for file, name in zip(files, names, strict=True):
                self._log_with_mlflow(file, PurePosixPath(name))
            return
        transport = Transport(self._tracking_uri)
        try:
            for file, name in zip(files, names, strict=True):
                retry_unavailable(partial(transport.upload, place.removeprefix(PROXY_SCHEME), name, file))
        finally:
            transport.close()

    def _log_with_mlflow(self, file: Path, name: PurePosixPath) -> None:
        """Upload with mlflow, which uses the file's own name, hence the link."""
        with TemporaryDirectory() as folder:
            named = Path(folder) / name.name
            named.symlink_to(file.resolve())
            parent = str(name.parent)
            self._client.log_artifact(self.id, str(named), None if parent == "." else parent)

    def register_model(self, name: str, artifact_path: str, tags: Mapping[str, str] | None = None) -> RegisteredVersion:
        """Register the artifact at `artifact_path` as the next version of a model.

        Repeated calls for the same run and name return the same version.

        Raises:
            hanzo_ml.client.transport.Refused: the run has no such artifact, or the name is not allowed.
        """
        transport = Transport(self._tracking_uri)
        try:
            registered = retry_unavailable(partial(transport.register, name, self.id, artifact_path, tags or {}))
        finally:
            transport.close()
        return RegisteredVersion(
            name=str(registered["name"]), version=int(registered["version"]), stage=str(registered["stage"])
        )

    def end(self, status: str = "FINISHED") -> None:
        """Send what is buffered, then set the status (one of MLflow's).

        A second call does nothing.
        """
        if self._ended:
            return
        self._ended = True
        self._on_end(self)
        unsent = self._metrics.close(DRAIN_SECONDS)
        if unsent:
            log.error("%s metrics of run %s could not be sent and are lost", len(unsent), self.id)
        self._client.set_terminated(self.id, status)


def split_batches(items: "Iterable[tuple[str, Any]]", size: int) -> "Iterable[list[tuple[str, Any]]]":
    iterator = iter(items)
    while part := list(islice(iterator, size)):
        yield part
