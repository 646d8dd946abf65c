"""An object of the store as an HTTP response, with ranges (RFC 9110, section 14)."""

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from api.artifacts.file_response import SAFE_HEADERS, parse_range, range_bounds
from recipes.storage.buckets import ObjectReplaced
from recipes.storage.object_transfer import StoredObject


def object_response(stored: StoredObject, request: Request) -> Response:
    """Send the bytes unverified: the reader knows their SHA-256.

    Raises:
        ObjectReplaced: it is not the version that `If-Match` names.
        FileNotFoundError: it was deleted meanwhile.
    """
    if request.headers.get("if-match", stored.version) != stored.version:
        raise ObjectReplaced
    headers = {**SAFE_HEADERS, "ETag": stored.version, "Accept-Ranges": "bytes"}
    part = parse_range(request.headers.get("range", ""))
    start, stop = range_bounds(part, stored.size) if part else (0, stored.size)
    if part and start >= stop:
        return Response(status_code=416, headers={**headers, "Content-Range": f"bytes */{stored.size}"})
    if part:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{stored.size}"
    headers["Content-Length"] = str(stop - start)
    chunks = stored.chunks(start, stop)
    return StreamingResponse(chunks, 206 if part else 200, media_type="application/octet-stream", headers=headers)
