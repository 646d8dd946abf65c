"""The metrics of a run on their way to the tracking server; what it has not acknowledged is part of every checkpoint."""

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from hanzo_ml.client.buffer import MetricBuffer
from hanzo_ml.client.points import Point
from hanzo_ml.client.repeated_steps import Anew
from recipes.contracts.job import BadConfiguration, Job

PENDING_METRICS = "pending_metrics"
"""How the name of the file begins that has them."""


def write_pending(points: Sequence[Point], folder: Path) -> None:
    """Into a checkpoint. The name says what is in it, and with that a checkpoint of a step has the same bytes under the same
    names whoever saves it.

    A program that was killed had a request on its way still, which arrived after the run had been started anew, and saved
    that step once more: of a checkpoint that was whole, one file was another then.
    """
    written = json.dumps([point.to_json() for point in points]).encode()
    (folder / f"{PENDING_METRICS}-{sha256(written).hexdigest()[:16]}.json").write_bytes(written)


def read_pending(folder: Path) -> list[Point]:
    """Of a checkpoint."""
    (file,) = folder.glob(f"{PENDING_METRICS}*.json")
    return [Point.from_json(point) for point in json.loads(file.read_bytes())]


def open_metrics(job: Job, resume: tuple[int, Path] | None, anew: Sequence[Anew], *, evaluates_first: bool) -> MetricBuffer:
    """The buffer to log into; it knows what a predecessor could not send, and leaves out what the server has already.

    A predecessor may have been killed before its first checkpoint: then the run begins anew, and the server is ahead.

    Steps in `anew` are logged once more: after a divergence they are done on other samples. A run that `evaluates_first`
    logs at the step of its checkpoint, as a predecessor may have done that was killed soon after.
    """
    if job.tracking is None:
        raise BadConfiguration("a training job needs `tracking`: the run that it logs to")
    metrics = MetricBuffer(job.tracking.uri, job.tracking.run_id)
    pending = read_pending(resume[1]) if resume else []
    metrics.skip_until(resume[0] - evaluates_first if resume else 0, anew, pending=pending)
    return metrics
