"""/v1/engine: deployments and files for the engine's replicas, and their reports.

Replicas authenticate with the token of the setting `engine.token`, which is valid for these routes only.
"""

import hashlib
from typing import Annotated

from fastapi import Path, Request, Response
from fastapi.responses import RedirectResponse
from typing_extensions import TypedDict

from api.artifacts.object_response import object_response
from api.auth.permissions import Permission
from api.dependencies import DatabaseDep, StoreDep
from api.json_bodies import Deleted, TypedResponse, json_response
from api.routing import Audit, Router
from recipes.storage.buckets import ObjectReplaced
from resources.errors import conflict, not_found
from resources.metadata.registry import engine_replicas
from resources.serving.replica_messages import ReplicaReport, WantedDeployment, WantedDeployments

router = Router("/v1/engine", tag="v1")


class ReportedReplica(TypedDict):
    """The replica whose report was stored."""

    replica: str


READ_SECONDS = 3600
"""Validity of a signed file address; a longer download requests another one."""

ReplicaName = Annotated[str, Path(pattern=r"^[A-Za-z0-9._:-]{1,250}$", description="host and port of the replica")]


@router.get("/deployments", Permission.ENGINE_PULL)
def list_wanted_deployments(request: Request, database: DatabaseDep) -> TypedResponse[WantedDeployments]:
    """Return the deployments to serve; 304 with `If-None-Match` if nothing changed."""
    with database.read() as connection:
        found = engine_replicas.list_wanted(connection)
    wanted = WantedDeployments(
        deployments=tuple(
            WantedDeployment(
                id=each.id,
                attempt=each.attempt,
                name=each.model.served_name,
                version=each.version,
                sha256=each.sha256,
                size_bytes=each.size_bytes,
                smoke_prompts=each.smoke_prompts,
            )
            for each in found
        )
    )
    etag = f'"{hashlib.sha256(wanted.model_dump_json().encode()).hexdigest()}"'
    if request.headers.get("if-none-match") == etag:
        return TypedResponse(status_code=304, headers={"ETag": etag})
    response = json_response(wanted)
    response.headers["ETag"] = etag
    return response


@router.get("/files/{sha256}", Permission.ENGINE_PULL, produces="application/octet-stream", ranges=True)
def get_wanted_file(
    request: Request,
    database: DatabaseDep,
    store: StoreDep,
    sha256: Annotated[str, Path(pattern=r"^[0-9a-f]{64}$")],
) -> Response:
    """Send a wanted file or a range; redirect to a signed address on S3."""
    with database.read() as connection:
        file = engine_replicas.find_wanted_file(connection, sha256)
    if file is None:
        raise not_found(f"no wanted deployment has a file with SHA-256 {sha256}")
    if url := store.signed_url(file.uri, READ_SECONDS):
        return RedirectResponse(url, 307)
    try:
        return object_response(store.open(file.uri), request)
    except FileNotFoundError:
        raise not_found(f"{file.uri} is missing in the object store: restore it or promote another version") from None
    except ObjectReplaced:
        raise conflict(f"{file.uri} was replaced while it was read: read it again") from None


@router.put("/replicas/{replica}", Permission.ENGINE_PULL, audit=Audit.NONE)
def report_replica(replica: ReplicaName, body: ReplicaReport, database: DatabaseDep) -> TypedResponse[ReportedReplica]:
    """Store what a replica serves, replacing its previous report.

    Replicas report every 5 s and on each change.
    """
    with database.write() as connection:
        engine_replicas.record_report(connection, replica, body.model_dump(mode="json"))
    return json_response(ReportedReplica(replica=replica))


@router.delete("/replicas/{replica}", Permission.ENGINE_PULL, audit=Audit.NONE)
def delete_replica(replica: ReplicaName, database: DatabaseDep) -> TypedResponse[Deleted]:
    """Remove a replica that shuts down, so that no deployment waits for it."""
    with database.write() as connection:
        engine_replicas.delete_replica(connection, replica)
    return json_response(Deleted(deleted=replica))
