"""What MLflow's clients ask about the server before they choose how to talk to it. Served below /api/3.0 too."""

from fastapi import APIRouter, Response

from api.mlflow.messages import answer

router = APIRouter(prefix="/mlflow", tags=["mlflow"])

MLFLOW_API_VERSION = "3.17.2"
"""The release whose REST API this is: clients compare it with the releases that brought a feature."""


@router.get("/server-info")
def server_info() -> Response:
    unsupported = (
        "workspaces_enabled",
        "trace_archival_enabled",
        "multipart_uploads_enabled",
        "multipart_downloads_enabled",
        "presigned_upload_run_id_supported",
        "presigned_upload_model_id_supported",
    )
    return answer(store_type="SqlStore", features_enabled=[], **dict.fromkeys(unsupported, False))
