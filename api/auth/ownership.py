"""Check that the objects a request names belong to the caller's organization."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fastapi import Request
from starlette.concurrency import run_in_threadpool

from api.auth.permissions import LOCAL, Caller
from api.dependencies import CallerDep, DatabaseDep
from api.middleware.request_body import parse_body
from recipes.storage import uris
from resources.errors import ErrorCode, HanzoError, not_found
from resources.jobs.sandbox import SANDBOX
from resources.metadata.artifacts.locations import EXPERIMENT_ID_PATTERN, PROXY_SCHEME
from resources.metadata.database import Database
from resources.metadata.field_rules import printable
from resources.metadata.ownership import ObjectKind, Reference, find_owners
from resources.metadata.registry.model_names import folder_organization

# Which objects a request names: pure functions from its path, query and body to references.
#
# A parameter's name determines the kind of object on every route, so a new route is covered if it uses the usual names.
# The ids that narrow a search (`experiment_ids`) are not references: a search only returns objects of the caller.

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
"""The listing of the artifact proxy; its `path` parameter corresponds to the path of the other routes."""
SUBMIT_ROUTES = ("POST /v1/jobs", "POST /api/v1/jobs")
"""A job's model is registered under the name of its definition; in the sandbox, under the job's own name."""


def references(
    route: str, path: Mapping[str, str], query: Mapping[str, Sequence[str]], body: Any = None
) -> frozenset[Reference]:
    """Return everything that a request names; `route` is a shape (`route_matching.shape`)."""
    fields = [*path.items(), *((name, value) for name, values in query.items() for value in values), *body_fields(body)]
    return frozenset(reference for name, value in fields for reference in parameter_references(route, name, value))


def body_fields(body: Any) -> Iterator[tuple[str, Any]]:
    """Yield members of a JSON object and of objects in its lists.

    Deeper ones are user data.
    """
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
    """Split `ids=A,B&ids=C` into unique ids, for access control and the endpoint alike."""
    return list(dict.fromkeys(part for text in texts for part in text.split(",") if part))


def proxy_path_references(path: str) -> Iterator[Reference]:
    """Yield the objects that a path of the artifact proxy names.

    Paths are `EXPERIMENT/RUN/...`, `EXPERIMENT/models/LOGGED_MODEL/...` or `models/REGISTERED_MODEL/VERSION/...`; any other
    belongs to the caller's own organization (`api.artifacts.locations`).
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
    """Yield what a model's source names: run, model, or owner of a stored object."""
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
    """Return the owner of a path in the store; an unknown owner matches no caller.

    For datasets see `resources.metadata.datasets`.
    """
    match parts:
        case [uris.PRODUCT_BUCKET, "runs" | "checkpoints", run, *_]:
            return Reference(ObjectKind.RUN, run)
        case [uris.PRODUCT_BUCKET, "datasets", *below] | [uris.MODELS_BUCKET, *below] if below:
            return Reference(ObjectKind.ORGANIZATION, folder_organization(below) or "")
        case _:
            return Reference(ObjectKind.ORGANIZATION, "")


# Check that the objects a request names belong to the caller's organization; for the caller, others do not exist.

MISSING = {
    ObjectKind.EXPERIMENT: "No Experiment with id={} exists",
    ObjectKind.RUN: "Run with id={} not found",
    ObjectKind.LOGGED_MODEL: "Logged model with ID '{}' not found.",
    ObjectKind.REGISTERED_MODEL: "Registered Model with name={} not found",
    ObjectKind.DATASET: "no dataset version has the id '{}': see `hanzo-ml dataset list`",
    ObjectKind.ORGANIZATION: "There is nothing at that place in this server's store",
    ObjectKind.SWEEP: "there is no sweep '{}': see `hanzo-ml hpo list`",
    ObjectKind.JOB: "there is no job '{}': see `hanzo-ml job list`",
}


def check_ownership(
    database: Database, caller: Caller, named: Iterable[Reference], *, may_be_new: bool, only_own: bool
) -> None:
    """Check all objects in one transaction.

    Raises:
        HanzoError: 404, with the same message for missing objects and for those of other organizations; 403 where the caller
            may change only their own.
    """
    wanted = sorted(named)
    with database.read() as connection:
        found = find_owners(connection, wanted, caller.organization)
    for reference in wanted:
        owner = found.get(reference)
        is_new_model = may_be_new and reference.kind is ObjectKind.REGISTERED_MODEL
        if owner is None and is_new_model:
            continue
        if owner is None or owner.organization != caller.organization:
            raise missing_object(reference)
        if only_own and reference.kind is ObjectKind.JOB and owner.user_id != caller.user_id:
            message = f"job '{printable(reference.id)}' is another user's: an ml-admin may do this"
            raise HanzoError(ErrorCode.PERMISSION_DENIED, message)


def require_ownership(database: Database, caller: Caller, *named: Reference) -> None:
    """Run `check_ownership` for endpoints declared with `checks_ownership`; does nothing without sign-in."""
    if caller is not LOCAL:
        check_ownership(database, caller, named, may_be_new=False, only_own=False)


def missing_object(reference: Reference) -> HanzoError:
    return not_found(MISSING[reference.kind].format(printable(reference.id)))


async def require_own_run(request: Request, database: DatabaseDep, caller: CallerDep) -> None:
    """Require that the objects in the body belong to the caller's organization, else 404 (dependency)."""
    if caller is LOCAL:
        return
    body = parse_body(await request.body(), request.scope["path"])
    request.state.run_id = body.get("run_id") or body.get("run_uuid") if isinstance(body, dict) else None
    named = references(f"{request.method} {request.url.path}", {}, {}, body)
    await run_in_threadpool(require_ownership, database, caller, *named)
