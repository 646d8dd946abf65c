"""Which objects a request names: pure functions from its path, query and body to references (row W5).

A parameter's name says what it names, whatever route it stands on, so a new route is covered by using the usual names. The
ids by which a search narrows itself (`experiment_ids`) are no references: a search finds only what is the caller's.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from recipes.storage import uris
from resources.jobs.sandbox import SANDBOX
from resources.metadata.artifacts.locations import EXPERIMENT_ID_PATTERN, PROXY_SCHEME
from resources.metadata.ownership import ObjectKind, Reference
from resources.metadata.registry.model_key import folder_organization

PARAMETER_KINDS: Mapping[str, ObjectKind] = {
    "experiment_id": ObjectKind.EXPERIMENT,
    "run_id": ObjectKind.RUN,
    "run_uuid": ObjectKind.RUN,
    "run_ids": ObjectKind.RUN,
    "run_uuids": ObjectKind.RUN,
    "ids": ObjectKind.RUN,
    "source_run_id": ObjectKind.RUN,
    "model_id": ObjectKind.LOGGED_MODEL,
    "dataset_id": ObjectKind.DATASET,
    "job_id": ObjectKind.JOB,
    "sweep_id": ObjectKind.SWEEP,
    "pipeline_id": ObjectKind.REGISTERED_MODEL,
}
REGISTRY_ROUTE = re.compile(r" .*(/registered-models/|/model-versions/|/v1/models(/|$)|/artifacts/models/)")
"""Routes whose `name` is a registered model."""
PROXY_LISTING_ROUTE = re.compile(r" .*/mlflow-artifacts/artifacts$")
"""The listing of the artifact proxy, whose `path` is what its other routes have in their path."""
SUBMIT_ROUTES = ("POST /v1/jobs", "POST /api/v1/jobs")
"""A job's model is registered under the name of its definition, or under the job's own in the sandbox."""


def references(
    route: str, path: Mapping[str, str], query: Mapping[str, Sequence[str]], body: Any = None
) -> frozenset[Reference]:
    """Everything that a request names, on a route of that shape (`route_matching.shape`)."""
    fields = [*path.items(), *((name, value) for name, values in query.items() for value in values), *body_fields(body)]
    return frozenset(reference for name, value in fields for reference in parameter_references(route, name, value))


def body_fields(body: Any) -> Iterator[tuple[str, Any]]:
    """The members of a JSON object, and of the objects in its lists. What lies deeper is the user's own data."""
    if isinstance(body, dict):
        for name, value in body.items():
            yield name, value
            for item in value if isinstance(value, list) else ():
                if isinstance(item, dict):
                    yield from item.items()


def parameter_references(route: str, name: str, value: Any) -> Iterator[Reference]:
    values = value if isinstance(value, list) else [value]
    texts = [str(each) for each in values if isinstance(each, str | int) and not isinstance(each, bool) and each != ""]
    if name == "ids":
        yield from (Reference(ObjectKind.RUN, run_id) for run_id in split_ids(texts))
    elif name in PARAMETER_KINDS:
        yield from (Reference(PARAMETER_KINDS[name], text) for text in texts)
    elif name == "name" and REGISTRY_ROUTE.search(route):
        yield from (Reference(ObjectKind.REGISTERED_MODEL, text) for text in texts)
    elif name in ("name", "model") and route in SUBMIT_ROUTES:
        yield from (Reference(ObjectKind.REGISTERED_MODEL, text) for text in texts if text != SANDBOX)
    elif name == "artifact_path" or (name == "path" and PROXY_LISTING_ROUTE.search(route)):
        for text in texts:
            yield from proxy_path_references(text)
    elif name in ("source", "artifact_uri") and REGISTRY_ROUTE.search(route):
        for text in texts:
            yield from uri_references(text)


def split_ids(texts: Sequence[str]) -> list[str]:
    """The ids of `ids=A,B&ids=C`, each once, as access control and the endpoint both read them."""
    return list(dict.fromkeys(part for text in texts for part in text.split(",") if part))


def proxy_path_references(path: str) -> Iterator[Reference]:
    """`EXPERIMENT/RUN/...`, `EXPERIMENT/models/LOGGED_MODEL/...` or `models/REGISTERED_MODEL/VERSION/...`.

    What begins with another name is a place of the caller's own organization, whatever it is (`api.artifacts.locations`).
    """
    parts = [part for part in path.split("/") if part]
    if parts[:1] == ["models"]:
        yield from (Reference(ObjectKind.REGISTERED_MODEL, name) for name in parts[1:2])
        return
    if not parts or not EXPERIMENT_ID_PATTERN.fullmatch(parts[0]):
        return
    yield Reference(ObjectKind.EXPERIMENT, parts[0])
    if parts[1:2] == ["models"]:
        yield from (Reference(ObjectKind.LOGGED_MODEL, model) for model in parts[2:3])
    else:
        yield from (Reference(ObjectKind.RUN, run) for run in parts[1:2])


def uri_references(uri: str) -> Iterator[Reference]:
    """What a model's source names: a run's files, a logged model, another registered model, a place in the object store."""
    scheme, _, rest = uri.partition(":")
    path = rest.lstrip("/")
    parts = [part for part in path.split("/") if part]
    if not parts:
        return
    if scheme == "runs":
        yield Reference(ObjectKind.RUN, parts[0])
    elif scheme == "models" and parts[0].startswith("m-"):
        yield Reference(ObjectKind.LOGGED_MODEL, parts[0])
    elif scheme == "models":
        yield Reference(ObjectKind.REGISTERED_MODEL, parts[0].partition("@")[0])
    elif scheme == PROXY_SCHEME:
        yield from proxy_path_references(
            "/".join(parts[1:] if rest.startswith("//") and not rest.startswith("///") else parts)
        )
    elif "/mlflow-artifacts/artifacts/" in rest:
        yield from proxy_path_references(rest.partition("/mlflow-artifacts/artifacts/")[2])
    elif scheme.lower() == "s3":
        yield store_reference(parts)


def store_reference(parts: Sequence[str]) -> Reference:
    """Whose a place in the object store is (a dataset's: `resources.metadata.datasets`), nobody's if it cannot be told."""
    match parts:
        case [uris.PRODUCT_BUCKET, "runs" | "checkpoints", run, *_]:
            return Reference(ObjectKind.RUN, run)
        case [uris.PRODUCT_BUCKET, "datasets", *below] | [uris.MODELS_BUCKET, *below] if below:
            return Reference(ObjectKind.ORGANIZATION, folder_organization(below) or "")
        case _:
            return Reference(ObjectKind.ORGANIZATION, "")
