"""Find the runs that used data, and the models made from those.

Lineage records artifacts. This module groups them into stops, and finds which stop followed which: all artifacts of a run or
of a model version are one stop.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy import Connection, or_, select

from recipes.storage import uris
from recipes.storage.artifact_store import BrokenArtifact, Store
from recipes.storage.manifest import Artifact
from resources.lineage.edges import DATA_KINDS, descendant_edges
from resources.metadata.database import Database
from resources.metadata.registry.model_versions import ModelVersion, read_versions
from resources.metadata.tables import inputs, jobs, params, run_inputs
from resources.metadata.tables import model_versions as versions

REPORT_KIND = "evaluation"
"""The kind of artifact from which nothing is made."""


class StopKind(StrEnum):
    DATA = "data"
    RUN = "run"
    MODEL = "model version"
    ARTIFACT = "artifact"


@dataclass(frozen=True)
class Stop:
    """A group of artifacts that data reached.

    `name` is the digest of data, the id of a run, a model version's reference, or else an artifact's URI.
    """

    kind: StopKind
    name: str


@dataclass(frozen=True)
class Reach:
    """The stops that follow each stop, and the model versions by reference.

    For each pair of stops, `after` has the roles in which the first was used in the second.
    """

    after: Mapping[Stop, Mapping[Stop, Collection[str]]]
    models: Mapping[str, ModelVersion]

    def learned(self) -> set[Stop]:
        """Return the runs that were trained on the data, and everything made from them.

        Runs that only evaluated with it are not included.
        """
        found: set[Stop] = set()
        waiting = [
            stop
            for data, following in self.after.items()
            for stop, roles in following.items()
            if data.kind is StopKind.DATA and "train" in roles
        ]
        while waiting:
            stop = waiting.pop()
            if stop not in found:
                found.add(stop)
                waiting += self.after.get(stop, ())
        return found


def compute_reach(
    database: Database, store: Store, organization: str, data: Collection[str], names: Collection[str]
) -> Reach:
    """Return everything that these datasets and splits reached.

    Args:
        data: the digests of the datasets and splits.
        names: the datasets' names in runs' params, because a run that did not complete has no lineage yet.
    """

    def follow(artifact: Artifact) -> bool:
        return artifact.digest in data if artifact.kind in DATA_KINDS else artifact.kind != REPORT_KIND

    own_versions = (
        select(versions).where(versions.c.organization == organization).order_by(versions.c.name, versions.c.version)
    )
    with database.read() as connection:
        edges = descendant_edges(connection, data, follow)
        registered = read_versions(connection, own_versions)
        unfinished = unfinished_runs(connection, organization, names)
    holders = {digest: Stop(StopKind.MODEL, model.reference) for model in registered for digest in model_digests(model)}
    after: dict[Stop, dict[Stop, set[str]]] = defaultdict(lambda: defaultdict(set))
    stops = {digest: Stop(StopKind.DATA, digest) for digest in data}
    for edge in edges:
        child = edge.child
        is_foreign = child.kind in DATA_KINDS and child.digest not in data
        is_comparison = child.kind == REPORT_KIND and edge.parent not in data  # a model was compared with others
        is_about_data = (
            edge.parent in data and child.kind not in DATA_KINDS and uris.parse_run_id(child.uri) is None
        )  # statistics
        if is_foreign or is_comparison or is_about_data:
            continue
        stops.setdefault(child.digest, artifact_stop(child, holders.get))
        before, here = stops[edge.parent], stops[child.digest]
        if before != here:
            after[before][here].add(edge.role)
        if here.kind is StopKind.RUN and child.kind != REPORT_KIND and child.digest in holders:
            after[here][holders[child.digest]].add(child.kind)
    for run in unfinished:
        for role, digest in recorded_inputs(store, run).items():
            if digest in data:
                after[stops[digest]][Stop(StopKind.RUN, run)].add(role)
    seen = {stop for following in after.values() for stop in following if stop.kind is StopKind.RUN}
    for model in registered:
        if model.run_id is not None and (run_stop := Stop(StopKind.RUN, model.run_id)) in seen:
            after[run_stop][Stop(StopKind.MODEL, model.reference)].add("run")
    return Reach(after, {model.reference: model for model in registered})


def artifact_stop(artifact: Artifact, holder: Callable[[str], Stop | None]) -> Stop:
    """Return the stop to which an artifact belongs."""
    if artifact.kind in DATA_KINDS:
        return Stop(StopKind.DATA, artifact.digest)
    if run_id := uris.parse_run_id(artifact.uri):
        return Stop(StopKind.RUN, run_id)
    return holder(artifact.digest) or Stop(StopKind.ARTIFACT, artifact.uri)


def model_digests(model: ModelVersion) -> list[str]:
    return [artifact.digest for artifact in model.own_artifacts.values()]


def unfinished_runs(connection: Connection, organization: str, names: Collection[str]) -> list[str]:
    """Return the runs on these datasets that did not complete: running, queued, failed or cancelled.

    A training run has the dataset as a param, a command's run as an input.
    """
    wanted = sorted(names)
    trained = select(params.c.run_id).where(params.c.key == "dataset", params.c.value.in_(wanted))
    read = select(run_inputs.c.run_id).join(inputs, inputs.c.id == run_inputs.c.input_id).where(inputs.c.name.in_(wanted))
    query = (
        select(jobs.c.id)
        .where(jobs.c.organization == organization, jobs.c.status != "completed")
        .where(or_(jobs.c.id.in_(trained), jobs.c.id.in_(read)))
        .order_by(jobs.c.submitted_at)
    )
    return list(connection.execute(query).scalars())


def recorded_inputs(store: Store, run_id: str) -> Mapping[str, str]:
    """Return the digest of each role's training data from a run's record.

    Empty if it has no record yet.
    """
    uri = uris.run_record(run_id)
    found = store.find(uri)
    if found is None:
        return {}
    try:
        return store.manifest(found).inputs
    except BrokenArtifact:
        return {}
