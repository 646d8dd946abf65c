"""What MLflow's clients ask about the server before they choose how to talk to it. Served below /api/3.0 too."""

from api.auth.permissions import Permission
from api.dependencies import SettingsOf
from api.responses import TypedResponse
from api.routing import Router
from api.schemas.mlflow import responses
from api.schemas.mlflow.messages import mlflow_response

router = Router("/mlflow", tag="mlflow", strict=False)

MLFLOW_API_VERSION = "3.17.2"
"""The release whose REST API this is: clients compare it with the releases that brought a feature."""


@router.get("/server-info", Permission.SERVER_READ, allows_jobs=True)
def server_info(settings: SettingsOf) -> TypedResponse[responses.ServerInfoAnswer]:
    return mlflow_response(
        store_type="SqlStore",
        workspaces_enabled=False,
        trace_archival_enabled=False,
        # Downloads never: every one would go past this server, and only some clients reach the S3 server.
        multipart_uploads_enabled=bool(settings.storage.endpoint and settings.storage.public_endpoint),
        multipart_downloads_enabled=False,
        # That the endpoint takes such requests, as in MLflow; whether it can sign for a file, it says itself.
        presigned_upload_run_id_supported=True,
        presigned_upload_model_id_supported=True,
        features_enabled={"gateway": False},
    )
