"""Send a verified file, or a range of it (RFC 9110, section 14).

Uploaded files are never rendered in the origin of this server (stored XSS, CVE-2024-27132).
"""

import mimetypes
import re
from urllib.parse import quote

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from api.artifacts.run_artifacts import is_logged_image
from api.artifacts.verified_files import SHA256_HEADER, VerifiedFile, replaced_while_read

SAFE_HEADERS = {"X-Content-Type-Options": "nosniff", "Content-Security-Policy": "sandbox; default-src 'none'"}
TOKEN_NAME = re.compile(r"[\w!#$&+.^`|~-]+", re.ASCII)
"""A name that needs neither quotes nor encoding in a header, which every client can read (RFC 6266)."""
QUOTABLE_NAME = re.compile(r"[ !#$&-\[\]-~]+")
"""A name that needs no escaping between quotes: printable ASCII except quote, backslash and percent sign."""
TEXT_EXTENSIONS = frozenset(
    {"txt", "log", "err", "cfg", "conf", "cnf", "cf", "ini", "properties", "prop", "hocon", "toml", "yaml", "yml", "xml"}
    | {"json", "js", "py", "py3", "csv", "tsv", "md", "rst", "ipynb", "MLmodel", "mlproject"}
)
"""Extensions, and names without one, that MLflow serves as plain text (`mlflow.utils.mime_type_utils`, 3.17)."""
RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)


def file_response(file: VerifiedFile, name: str, request: Request) -> Response:
    etag = f'"{file.sha256}"'
    headers = {
        **SAFE_HEADERS,
        "Content-Disposition": f"attachment; {filename_parameter(name)}",
        # Not as `media_type`, for which Starlette would add a charset that may be wrong.
        "Content-Type": content_type(name),
        "Accept-Ranges": "bytes",
        "ETag": etag,
        SHA256_HEADER: file.sha256,
    }
    # If the client's partial copy is of other content, ignore the range and send the whole file.
    asked = parse_range(request.headers.get("range", "")) if request.headers.get("if-range", etag) == etag else None
    start, stop, status = 0, file.size, 200
    if asked is not None:
        start, stop = range_bounds(asked, file.size)
        if start >= stop:
            return Response(status_code=416, headers={**headers, "Content-Range": f"bytes */{file.size}"})
        status = 206
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{file.size}"
    headers["Content-Length"] = str(stop - start)
    if request.method == "HEAD":
        return Response(status_code=status, headers=headers)
    try:
        chunks = file.chunks(start, stop)
    except FileNotFoundError:
        raise replaced_while_read() from None
    return StreamingResponse(chunks, status_code=status, headers=headers)


def filename_parameter(name: str) -> str:
    """Format the `filename` parameter of a `Content-Disposition` header.

    A percent sign stays plain only in MLflow's own names: some browsers decode it elsewhere.
    """
    plain = name.replace("%", "") if is_logged_image(name) else name
    if TOKEN_NAME.fullmatch(plain):
        return f"filename={name}"
    return f'filename="{name}"' if QUOTABLE_NAME.fullmatch(name) else f"filename*=UTF-8''{quote(name, safe='')}"


def content_type(name: str) -> str:
    _, dot, extension = name.rpartition(".")
    if (extension if dot else name) in TEXT_EXTENSIONS:
        return "text/plain"
    return mimetypes.guess_type(name)[0] or "application/octet-stream"


def parse_range(header: str) -> tuple[int | None, int | None] | None:
    """Return first and last byte of a range; `(None, 10)` for the last 10 bytes.

    None for any other header: it is ignored, as the standard allows, and the whole file is sent.
    """
    found = RANGE.fullmatch(header)
    if found is None:
        return None
    first, last = (int(digits) if digits else None for digits in found.groups())
    if first is None and last is None:
        return None
    return None if first is not None and last is not None and last < first else (first, last)


def range_bounds(part: tuple[int | None, int | None], size: int) -> tuple[int, int]:
    """Return start and end (exclusive) of a range; start >= end outside of the file."""
    first, last = part
    if first is None:
        return max(0, size - (last or 0)), size
    return first, size if last is None else min(last + 1, size)
