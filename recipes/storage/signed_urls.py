"""Signed URLs for multipart uploads and downloads that clients perform directly with S3.

Uses boto3, because obstore can sign neither parts nor single steps of an upload. It takes half a second and 30 MB to
import, so it is imported at the first request.
"""

import base64
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from recipes.contracts.job import StoreAddress
from recipes.storage.buckets import StoreUnavailable
from recipes.storage.locations import Location, local_store_root, resolve_uri

MAX_PARTS = 10_000
"""S3's limit per object."""
UPLOAD_URL_SECONDS = 6 * 3600
"""All URLs of an upload are signed at its start: long enough for a large upload over a slow line."""
DOWNLOAD_URL_SECONDS = 900
INVALID_PART_CODES = (
    "InvalidPart",
    "InvalidPartOrder",
    "EntityTooSmall",
    "InvalidRequest",
    "MalformedXML",
    "InvalidArgument",
)


class UploadRefused(Exception):
    """The S3 server rejects the list of parts."""


@dataclass(frozen=True)
class MultipartUpload:
    """An upload in progress: part number N is sent to the Nth URL."""

    id: str
    part_urls: tuple[str, ...]


@dataclass(frozen=True)
class UploadedPart:
    """An uploaded part; `sha256` is hexadecimal, set for uploads with checksums."""

    number: int
    etag: str
    sha256: str | None = None


@dataclass(frozen=True)
class SignedRequest:
    """A URL and the signed headers that must be sent with it."""

    url: str
    headers: Mapping[str, str]


class SignedTransfers:
    """Signed URLs for objects at a `StoreAddress` on an S3 server.

    Args:
        variables: AWS variables that override those of the environment.
        public_endpoint: the server's address for clients; None if it is the same as for this process.
    """

    def __init__(self, address: StoreAddress, variables: Mapping[str, str], public_endpoint: str | None = None) -> None:
        self._address = address
        self._variables = variables
        self._public_endpoint = public_endpoint

    @property
    def is_available(self) -> bool:
        """Whether the store is an S3 server: a folder has no URLs."""
        return local_store_root(self._address) is None

    def begin(self, uri: str, parts: int) -> MultipartUpload:
        """Start a multipart upload with signed URLs for its parts.

        Raises:
            BrokenArtifact: `uri` is no URI of this store.
            StoreUnavailable: the server does not answer.
        """
        place = self._bucket_and_key(uri)
        with translate_s3_errors(uri):
            begun = self._client.create_multipart_upload(**place, **self._encryption)
        identifier: str = begun["UploadId"]
        urls = (
            self._sign("upload_part", UPLOAD_URL_SECONDS, **place, UploadId=identifier, PartNumber=number)
            for number in range(1, parts + 1)
        )
        return MultipartUpload(identifier, tuple(urls))

    def begin_with_checksums(self, uri: str) -> str:
        """Start an upload whose parts are signed individually with their SHA-256; returns its id.

        Raises:
            BrokenArtifact: `uri` is no URI of this store.
            StoreUnavailable: the server does not answer.
        """
        algorithm = {} if self._address.checksum == "none" else {"ChecksumAlgorithm": self._address.checksum}
        with translate_s3_errors(uri):
            begun = self._client.create_multipart_upload(**self._bucket_and_key(uri), **self._encryption, **algorithm)
        return str(begun["UploadId"])

    def part_request(self, uri: str, upload_id: str, number: int, sha256: str, seconds: int) -> SignedRequest:
        """Sign the upload of one part, valid for these bytes only."""
        headers = self._checksum_headers(sha256)
        place = {**self._bucket_and_key(uri), "UploadId": upload_id, "PartNumber": number}
        return SignedRequest(self._sign("upload_part", seconds, **place, **self._checksum(sha256)), headers)

    def put_request(self, uri: str, sha256: str, seconds: int) -> SignedRequest:
        """Sign a request that stores a whole object, valid for these bytes only."""
        headers = self._checksum_headers(sha256)
        if self._address.encryption != "none":
            headers["x-amz-server-side-encryption"] = self._address.encryption
        if self._address.kms_key:
            headers["x-amz-server-side-encryption-aws-kms-key-id"] = self._address.kms_key
        parameters = {**self._bucket_and_key(uri), **self._encryption, **self._checksum(sha256)}
        return SignedRequest(self._sign("put_object", seconds, **parameters), headers)

    def complete(self, uri: str, upload_id: str, parts: Sequence[UploadedPart]) -> None:
        """Combine the parts into one object.

        Raises:
            FileNotFoundError: there is no such upload for `uri`.
            UploadRefused: these are not its parts.
        """
        listed = [
            {"PartNumber": part.number, "ETag": part.etag, **(self._checksum(part.sha256) if part.sha256 else {})}
            for part in sorted(parts, key=lambda part: part.number)
        ]
        made = {"MultipartUpload": {"Parts": listed}, "UploadId": upload_id}
        with translate_s3_errors(uri):
            self._client.complete_multipart_upload(**self._bucket_and_key(uri), **made)

    def abort(self, uri: str, upload_id: str) -> None:
        """Abort an upload. Raises FileNotFoundError if there is no such upload for `uri`."""
        with translate_s3_errors(uri):
            self._client.abort_multipart_upload(**self._bucket_and_key(uri), UploadId=upload_id)

    def download_url(self, uri: str) -> str:
        """Return a URL that downloads the object for 15 minutes.

        Browsers save it and never render it as a page.
        """
        return self._sign(
            "get_object", DOWNLOAD_URL_SECONDS, **self._bucket_and_key(uri), ResponseContentDisposition="attachment"
        )

    def _sign(self, operation: str, seconds: int, **parameters: Any) -> str:
        url: str = self._signer.generate_presigned_url(operation, Params=parameters, ExpiresIn=seconds)
        return url

    def _bucket_and_key(self, uri: str) -> dict[str, str]:
        found: Location = resolve_uri(self._address, uri)
        return {"Bucket": found.bucket, "Key": found.key}

    @property
    def _encryption(self) -> dict[str, str]:
        encryption: dict[str, str] = {}
        if self._address.encryption != "none":
            encryption["ServerSideEncryption"] = self._address.encryption
        if self._address.kms_key:
            encryption["SSEKMSKeyId"] = self._address.kms_key
        return encryption

    def _checksum(self, sha256: str) -> dict[str, str]:
        return {} if self._address.checksum == "none" else {"ChecksumSHA256": encode_checksum(sha256)}

    def _checksum_headers(self, sha256: str) -> dict[str, str]:
        return {} if self._address.checksum == "none" else {"x-amz-checksum-sha256": encode_checksum(sha256)}

    @cached_property
    def _client(self) -> Any:
        return self._connect(self._address.root)

    @cached_property
    def _signer(self) -> Any:
        return self._connect(self._public_endpoint or self._address.root)

    def _connect(self, endpoint: str) -> Any:
        import boto3  # type: ignore[import-untyped]
        from botocore.config import Config  # type: ignore[import-untyped]

        known = {**os.environ, **self._variables}
        return boto3.session.Session().client(
            "s3",
            endpoint_url=endpoint,
            region_name=known.get("AWS_REGION", known.get("AWS_DEFAULT_REGION", "us-east-1")),
            aws_access_key_id=known.get("AWS_ACCESS_KEY_ID"),
            aws_secret_access_key=known.get("AWS_SECRET_ACCESS_KEY"),
            aws_session_token=known.get("AWS_SESSION_TOKEN"),
            config=Config(signature_version="s3v4", s3={"addressing_style": "path"}),
        )


def encode_checksum(sha256: str) -> str:
    """Convert a hexadecimal SHA-256 to base64, as S3 expects it."""
    return base64.b64encode(bytes.fromhex(sha256)).decode()


def multipart_etag(parts: Sequence[UploadedPart]) -> str | None:
    """Return S3's ETag of an object of these parts, or None if unknown.

    It is a hash of the parts' MD5s.
    """
    try:
        digests = [bytes.fromhex(part.etag.strip('"')) for part in sorted(parts, key=lambda part: part.number)]
    except ValueError:
        return None
    return f"{hashlib.md5(b''.join(digests), usedforsecurity=False).hexdigest()}-{len(digests)}"


@contextmanager
def translate_s3_errors(uri: str) -> Iterator[None]:
    from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-untyped]

    try:
        yield
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", ""))
        if code == "NoSuchUpload":
            raise FileNotFoundError(f"there is no such upload for {uri}") from None
        if code in INVALID_PART_CODES:
            raise UploadRefused(f"{uri}: {code}") from None
        raise StoreUnavailable(f"{uri}: {code}") from error
    except BotoCoreError as error:
        raise StoreUnavailable(f"{uri}: {type(error).__name__}") from error
