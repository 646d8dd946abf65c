"""The web UI's build from the `mlflow` wheel, without importing that package."""

from importlib.util import find_spec
from pathlib import Path

from fastapi import Response
from fastapi.responses import FileResponse, HTMLResponse, PlainTextResponse

from api.auth.permissions import Permission
from api.routing import Router
from resources.errors import not_found

router = Router(strict=False, include_in_schema=False)

MISSING = """Hanzo ML's tracking server. Its API is at /api/2.0/mlflow and /v1, described at /docs.

The web UI is not installed: run `pip install 'hanzo-ml[ui]'` in this server's environment and load this page again.
"""
POLICY = (
    # The build needs `unsafe-eval`, but loads no scripts of others; its styles and some icons are inline.
    "default-src 'self'; script-src 'self' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "font-src 'self' data:; worker-src 'self' blob:; object-src 'none'; base-uri 'self'; frame-ancestors 'none'"
)
FIRST_VISIT = "first_visit.js"
"""Script that runs before the build: the only addition to its page."""
CACHED = "public, max-age=2419200, immutable"
"""File names in the build's `static` folder contain a hash of their content."""


def build_folder() -> Path | None:
    """Return the build's folder in the installed wheel; None for mlflow-skinny, or without mlflow."""
    spec = find_spec("mlflow")
    for location in (spec.submodule_search_locations or []) if spec else []:
        folder = Path(location) / "server" / "js" / "build"
        if (folder / "index.html").is_file():
            return folder
    return None


@router.get("/", Permission.SERVER_READ)
def index() -> Response:
    folder = build_folder()
    if folder is None:
        return PlainTextResponse(MISSING)
    page = (
        (folder / "index.html")
        .read_text(encoding="utf-8")
        .replace("<head>", f'<head><script src="{FIRST_VISIT}"></script>', 1)
    )
    headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache", "Referrer-Policy": "same-origin"}
    return HTMLResponse(page, headers=headers)


@router.get(f"/{FIRST_VISIT}", Permission.SERVER_READ)
def first_visit() -> Response:
    return FileResponse(Path(__file__).parent / FIRST_VISIT, headers={"Cache-Control": "no-cache"})


@router.get("/static-files/{path:path}", Permission.SERVER_READ)
def static_file(path: str) -> Response:
    folder = build_folder()
    file = file_below(folder, path) if folder else None
    if file is None:
        raise not_found("There is no such file in the web UI")
    headers = {"X-Content-Type-Options": "nosniff"}
    if path.startswith("static/"):
        headers["Cache-Control"] = CACHED
    return FileResponse(file, headers=headers)


def file_below(folder: Path, path: str) -> Path | None:
    try:
        file = (folder / path).resolve()
        return file if file.is_relative_to(folder.resolve()) and file.is_file() else None
    except (OSError, ValueError):  # a name that file systems refuse: too long, or with a NUL
        return None
