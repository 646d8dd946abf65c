"""Compute logs in the object store, with presigned download links of signature version 4."""

from collections.abc import Sequence

import boto3  # type: ignore[import-untyped]
from botocore.config import Config  # type: ignore[import-untyped]
from dagster._core.storage.compute_log_manager import ComputeIOType
from dagster_aws.s3.compute_log_manager import S3ComputeLogManager

LINK_SECONDS = 3600


class ObjectStoreLogManager(S3ComputeLogManager):  # type: ignore[misc]
    """dagster-aws's log manager, except that download links work with more servers.

    Its own links have signature version 2, which few servers accept; these have version 4.
    """

    def download_url_for_type(self, log_key: Sequence[str], io_type: ComputeIOType) -> str | None:
        """Return a presigned URL; None for incomplete or empty streams."""
        if not self.is_capture_complete(log_key) or not self.cloud_storage_has_logs(log_key, io_type):
            return None
        client = boto3.client(
            "s3",
            endpoint_url=self._s3_session.meta.endpoint_url,
            region_name=self._s3_session.meta.region_name or "us-east-1",
            config=Config(signature_version="s3v4", s3={"addressing_style": "path"}),
        )
        place = {"Bucket": self._s3_bucket, "Key": S3ComputeLogManager._s3_key(self, log_key, io_type)}
        return str(client.generate_presigned_url("get_object", Params=place, ExpiresIn=LINK_SECONDS))
