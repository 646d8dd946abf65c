"""S3 server over HTTP for tests, based on moto.

It records every request, and refuses bodies that do not match their checksum, which moto accepts.
"""

import base64
import hashlib
import io
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import boto3
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
from werkzeug.wrappers import Response

from recipes.contracts.job import StoreAddress

BUCKETS = {"datasets": "hanzo-ml-datasets", "checkpoints": "hanzo-ml-checkpoints", "models": "hanzo-models"}
ACCESS_KEY, SECRET_KEY = "the-access-key", "the-secret-key"
BAD_DIGEST = (
    "<Error><Code>BadDigest</Code><Message>The SHA256 you specified did not match the calculated checksum.</Message></Error>"
)
DENIED = "<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
VARIABLES = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}


@dataclass(frozen=True)
class S3Request:
    method: str
    path: str
    query: str
    headers: dict[str, str]


@dataclass
class S3Server:
    url: str
    requests: list[S3Request] = field(default_factory=list)
    uploads_began: datetime = field(default_factory=lambda: datetime.now(UTC))
    """Start time that the server reports for every incomplete upload."""
    breaking: int = 0
    """Number of next uploaded bodies in which one bit is flipped."""
    refusing: int = 0
    """Number of next uploaded bodies that are refused."""
    spoiling: str = ""
    """Name of an object in whose next download one bit is flipped."""

    def __post_init__(self) -> None:
        self.client = boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            region_name="us-east-1",
        )

    @property
    def address(self) -> StoreAddress:
        return StoreAddress(root=self.url, buckets=BUCKETS)

    def empty(self) -> None:
        """Empty the buckets and forget the recorded requests."""
        known = {bucket["Name"] for bucket in self.client.list_buckets()["Buckets"]}
        for bucket in BUCKETS.values():
            if bucket not in known:
                self.client.create_bucket(Bucket=bucket)
            for found in self.client.list_objects_v2(Bucket=bucket).get("Contents", []):
                self.client.delete_object(Bucket=bucket, Key=found["Key"])
            for left in self.client.list_multipart_uploads(Bucket=bucket).get("Uploads", []):
                self.client.abort_multipart_upload(Bucket=bucket, Key=left["Key"], UploadId=left["UploadId"])
        self.requests.clear()
        self.breaking = self.refusing = 0
        self.spoiling = ""
        self.uploads_began = datetime.now(UTC)


@contextmanager
def s3_server() -> Iterator[S3Server]:
    application = DomainDispatcherApplication(create_backend_app)
    requests: list[S3Request] = []
    found: S3Server

    def remembering(environ: dict[str, Any], start_response: Any) -> Any:
        headers = {
            name.removeprefix("HTTP_").lower().replace("_", "-"): value
            for name, value in environ.items()
            if name.startswith("HTTP_")
        }
        requests.append(S3Request(environ["REQUEST_METHOD"], environ["PATH_INFO"], environ["QUERY_STRING"], headers))
        checksum = headers.get("x-amz-checksum-sha256")
        if environ["REQUEST_METHOD"] == "PUT" and found.refusing:
            found.refusing -= 1
            environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
            return Response(DENIED, 403, mimetype="application/xml")(environ, start_response)
        if environ["REQUEST_METHOD"] == "PUT" and (checksum or found.breaking):
            body = bytearray(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
            if found.breaking:
                found.breaking -= 1
                body[len(body) // 2] ^= 1
            if checksum and checksum != base64.b64encode(hashlib.sha256(body).digest()).decode():
                return Response(BAD_DIGEST, 400, mimetype="application/xml")(environ, start_response)
            environ["wsgi.input"] = io.BytesIO(body)
        if environ["REQUEST_METHOD"] == "POST" and "uploadId=" in environ["QUERY_STRING"]:
            # moto fails or succeeds again for an upload that no longer exists; MinIO and Ceph answer NoSuchUpload.
            asked = {**environ, "REQUEST_METHOD": "GET", "wsgi.input": io.BytesIO(), "CONTENT_LENGTH": "0"}
            parts = Response.from_app(application, asked)
            if parts.status_code == 404:
                return parts(environ, start_response)
        if environ["REQUEST_METHOD"] == "GET" and found.spoiling and environ["PATH_INFO"].endswith(f"/{found.spoiling}"):
            found.spoiling = ""
            given = Response.from_app(application, environ)
            body = bytearray(given.get_data())
            body[len(body) // 2] ^= 1
            given.set_data(bytes(body))
            return given(environ, start_response)
        if environ["REQUEST_METHOD"] != "GET" or "uploads" not in environ["QUERY_STRING"]:
            return application(environ, start_response)
        # moto reports 2010 as the start of every upload, which would make each an abandoned one.
        answer = Response.from_app(application, environ)
        begun = found.uploads_began.strftime("%Y-%m-%dT%H:%M:%S.000Z").encode()
        answer.set_data(re.sub(rb"(<Initiated>).*?(</Initiated>)", rb"\g<1>" + begun + rb"\g<2>", answer.get_data()))
        return answer(environ, start_response)

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", 0, remembering, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        found = S3Server(f"http://127.0.0.1:{server.port}", requests)
        found.empty()
        yield found
    finally:
        server.shutdown()
        thread.join()
