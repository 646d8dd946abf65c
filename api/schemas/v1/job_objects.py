"""Requests and responses about objects of a program on a cluster."""

from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from api.json_bodies import Body
from recipes.storage.signed_urls import MAX_PARTS

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Uri = Annotated[str, Field(min_length=1, max_length=4096, description="logical URI of an object")]
Uris = Annotated[tuple[Uri, ...], Field(max_length=1000)]
PartNumber = Annotated[int, Field(ge=1, le=MAX_PARTS)]


class NewObject(Body):
    uri: Uri
    sha256: Sha256


class AddressesBody(Body):
    reads: Uris = ()
    writes: Annotated[tuple[NewObject, ...], Field(max_length=1000)] = ()


class HeadBody(Body):
    uris: Uris


class ListBody(Body):
    uri: Uri
    recursive: bool = True


class DeleteBody(Body):
    uris: Uris


class CopyBody(Body):
    source: Uri
    uri: Uri


class UploadBody(Body):
    uri: Uri


class NewPart(Body):
    number: PartNumber
    sha256: Sha256


class PartsBody(Body):
    uri: Uri
    upload_id: str
    parts: Annotated[tuple[NewPart, ...], Field(min_length=1, max_length=1000)]


class StoredPart(Body):
    number: PartNumber
    etag: str
    sha256: Sha256


class CompleteBody(Body):
    uri: Uri
    upload_id: str
    parts: Annotated[tuple[StoredPart, ...], Field(min_length=1, max_length=MAX_PARTS)]


class AbortBody(Body):
    uri: Uri
    upload_id: str


class SignedAddress(TypedDict):
    """Where to send a request, with which headers, for `expires_in` seconds.

    A URL without a scheme is relative to the address of the program's objects, and needs the program's token.
    """

    url: str
    headers: dict[str, str]
    expires_in: int


class SignedAddresses(TypedDict):
    """In the order of the request; null for a write that must use `PUT content`."""

    reads: list[SignedAddress]
    writes: list[SignedAddress | None]


class StoredObjectHead(TypedDict):
    """`version` is the ETag, for If-Match; `modified_ms` is in ms since 1970."""

    uri: str
    size: int
    version: str
    modified_ms: int
    address: SignedAddress


class ObjectHeads(TypedDict):
    """In the order of the request; null for a missing object."""

    objects: list[StoredObjectHead | None]


class ListedObject(TypedDict):
    uri: str
    size: int


class ObjectListing(TypedDict):
    """Objects below a URI, and the folders directly below it unless recursive."""

    objects: list[ListedObject]
    folders: list[str]


class ObjectUpload(TypedDict):
    """A multipart upload; without an id, send the whole object with `PUT content`."""

    upload_id: str | None


class PartAddresses(TypedDict):
    """In the order of the request."""

    parts: list[SignedAddress]


class WrittenObjects(TypedDict):
    """URIs of the changed objects."""

    uris: list[str]
