"""Uploads in parts and downloads that clients do with the S3 server themselves, over URLs signed for them beforehand.

By boto3, because obstore can sign neither a part nor one side of an upload. It takes half a second and 30 MB to import, so
that happens when the first client asks.
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
"""Of one object, as S3 has it."""
UPLOAD_URL_SECONDS = 6 * 3600
"""All URLs of an upload are signed when it begins: as long as a large one takes over a slow line."""
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
    """The S3 server does not take what the client says of its parts."""


@dataclass(frozen=True)
class MultipartUpload:
    """An upload on its way: part number N goes to the Nth URL."""

    id: str
    part_urls: tuple[str, ...]


@dataclass(frozen=True)
class UploadedPart:
    """A part that arrived; `sha256` is hexadecimal, of uploads that were begun with checksums."""

    number: int
    etag: str
    sha256: str | None = None


@dataclass(frozen=True)
class SignedRequest:
    """A URL, and the headers that have to be sent with it because they are signed."""

    url: str
    headers: Mapping[str, str]


class SignedTransfers:
    """Objects at a `StoreAddress` on an S3 server.

    Args:
        variables: AWS variables that go before those of the environment.
        public_endpoint: the same server as clients reach it; None where they reach it as this process does.
    """

    def __init__(self, address: StoreAddress, variables: Mapping[str, str], public_endpoint: str | None = None) -> None:
        self._address = address
        self._variables = variables
        self._public_endpoint = public_endpoint

    @property
    def is_available(self) -> bool:
        """Whether there is an S3 server: a folder has no URLs."""
        return local_store_root(self._address) is None

    def begin(self, uri: str, parts: int) -> MultipartUpload:
        """Raises BrokenArtifact where `uri` is none of this store, StoreUnavailable."""
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
        """The id of an upload whose parts are signed one by one (`part_requests`), each with its SHA-256.

        Raises:
            BrokenArtifact: `uri` is none of this store.
            StoreUnavailable: the server does not answer.
        """
        algorithm = {} if self._address.checksum == "none" else {"ChecksumAlgorithm": self._address.checksum}
        with translate_s3_errors(uri):
            begun = self._client.create_multipart_upload(**self._bucket_and_key(uri), **self._encryption, **algorithm)
        return str(begun["UploadId"])

    def part_request(self, uri: str, upload_id: str, number: int, sha256: str, seconds: int) -> SignedRequest:
        """The request that uploads one part, good for these bytes only."""
        headers = self._checksum_headers(sha256)
        place = {**self._bucket_and_key(uri), "UploadId": upload_id, "PartNumber": number}
        return SignedRequest(self._sign("upload_part", seconds, **place, **self._checksum(sha256)), headers)

    def put_request(self, uri: str, sha256: str, seconds: int) -> SignedRequest:
        """The request that stores an object whole, good for these bytes only."""
        headers = self._checksum_headers(sha256)
        if self._address.encryption != "none":
            headers["x-amz-server-side-encryption"] = self._address.encryption
        if self._address.kms_key:
            headers["x-amz-server-side-encryption-aws-kms-key-id"] = self._address.kms_key
        parameters = {**self._bucket_and_key(uri), **self._encryption, **self._checksum(sha256)}
        return SignedRequest(self._sign("put_object", seconds, **parameters), headers)

    def complete(self, uri: str, upload_id: str, parts: Sequence[UploadedPart]) -> None:
        """Make one object of the parts.

        Raises:
            FileNotFoundError: no such upload is on its way to `uri`.
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
        """Raises FileNotFoundError where no such upload is on its way to `uri`."""
        with translate_s3_errors(uri):
            self._client.abort_multipart_upload(**self._bucket_and_key(uri), UploadId=upload_id)

    def download_url(self, uri: str) -> str:
        """A URL that gives the object to whoever has it, as a download and never as a page, for a quarter of an hour."""
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
    """A hexadecimal SHA-256 in base64, as S3 has it."""
    return base64.b64encode(bytes.fromhex(sha256)).decode()


def multipart_etag(parts: Sequence[UploadedPart]) -> str | None:
    """The ETag of the object that S3 makes of these parts: a hash of their MD5s. None where what they have is no MD5."""
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
            raise FileNotFoundError(f"no such upload is on its way to {uri}") from None
        if code in INVALID_PART_CODES:
            raise UploadRefused(f"{uri}: {code}") from None
        raise StoreUnavailable(f"{uri}: {code}") from error
    except BotoCoreError as error:
        raise StoreUnavailable(f"{uri}: {type(error).__name__}") from error
