"""Remove leftovers of interrupted uploads after a day: they are invisible, but take space.

`python -m recipes.abandoned_uploads ADDRESS` runs in its own process, because boto3 takes 30 MB that a server would keep. It
is needed because obstore cannot list incomplete uploads; a lifecycle rule of the bucket (AbortIncompleteMultipartUpload) has
the same effect.
"""

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from recipes.contracts.job import StoreAddress
from recipes.storage.buckets import UNFINISHED_UPLOAD
from recipes.storage.locations import local_store_root

ABANDONED_AFTER_SECONDS = 24 * 3600.0


def remove_abandoned_uploads(address: StoreAddress) -> int:
    """Remove unfinished uploads that are a day old, and return their number.

    Younger ones may be in progress in another process.
    """
    root = local_store_root(address)
    cutoff = time.time() - ABANDONED_AFTER_SECONDS
    return abort_multipart_uploads(address, cutoff) if root is None else remove_unfinished_files(root, cutoff)


def remove_unfinished_files(root: Path, cutoff: float) -> int:
    removed = 0
    for folder, _, names in os.walk(root):
        for path in (Path(folder) / name for name in names if UNFINISHED_UPLOAD.fullmatch(name)):
            with suppress(FileNotFoundError):
                if path.lstat().st_mtime < cutoff:
                    path.unlink()
                    removed += 1
    return removed


def abort_multipart_uploads(address: StoreAddress, cutoff: float) -> int:
    import boto3  # type: ignore[import-untyped]  # slow to import, and only needed here

    client = boto3.client("s3", endpoint_url=address.root, region_name=os.environ.get("AWS_REGION", "us-east-1"))
    removed = 0
    for bucket in sorted(set(address.buckets.values())):
        for page in client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket):
            for upload in page.get("Uploads", []):
                if upload["Initiated"].timestamp() < cutoff:
                    with suppress(client.exceptions.NoSuchUpload):  # another process removed it
                        client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
                        removed += 1
    return removed


if __name__ == "__main__":
    print(remove_abandoned_uploads(StoreAddress.model_validate_json(sys.argv[1])))
