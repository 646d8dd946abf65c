"""MLflow's uploads and downloads past this server, over presigned URLs: not offered, and answered with 501, as the reference
does for a store that cannot. `server-info` says the same beforehand, so its clients do not ask.

Such bytes would come in without their SHA-256 being seen (row X7), and every client would have to reach the object store.
"""

from fastapi import APIRouter

from api.run_artifacts import checked_path
from resources.errors import ErrorCode, HanzoError

router = APIRouter(tags=["mlflow"])


@router.post("/mlflow-artifacts/mpu/create/{artifact_path:path}", status_code=501)
@router.post("/mlflow-artifacts/mpu/complete/{artifact_path:path}", status_code=501)
@router.post("/mlflow-artifacts/mpu/abort/{artifact_path:path}", status_code=501)
async def multipart_upload(artifact_path: str) -> None:
    checked_path(artifact_path)
    raise unsupported("Multipart upload")


@router.get("/mlflow-artifacts/presigned/{artifact_path:path}", status_code=501)
async def multipart_download(artifact_path: str) -> None:
    checked_path(artifact_path)
    raise unsupported("Multipart download")


@router.post("/mlflow/artifacts/presigned-upload-url", status_code=501)
async def presigned_upload() -> None:
    raise unsupported("Presigned upload")


@router.post("/mlflow/artifacts/presigned-download-url", status_code=501)
async def presigned_download() -> None:
    raise unsupported("Presigned download")


def unsupported(what: str) -> HanzoError:
    return HanzoError(ErrorCode.NOT_IMPLEMENTED, f"{what} is not supported for the current artifact repository")
