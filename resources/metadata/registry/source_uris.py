"""The forms that a version's source may have, by its words alone: nothing is looked up here.

Which of them a client may name for a version, and whether anything lies there, is `model_version_sources`.
"""

import re
from urllib.parse import unquote_plus

from recipes.storage import uris
from resources.errors import HanzoError, invalid
from resources.metadata.artifacts.artifact_locations import PROXY, VERSIONS
from resources.metadata.artifacts.locations import FOLDER
from resources.metadata.tracking_rules import printable

LOGGED_MODEL = re.compile(r"m-[\w\-]+")
FORBIDDEN = re.compile(r"[\x00-\x1f\x7f\\#?%\ufffd]")
HOST_SCHEMES = ("http", "https", "ftp", "sftp", PROXY)


def parse(source: str) -> tuple[str, list[str]]:
    """Scheme and path of a source without a host. Raises for every form that is refused."""
    scheme, colon, rest = source.partition(":")
    foreign = rest.startswith("//") and scheme.lower() in HOST_SCHEMES
    if not colon or scheme.lower() == "file" or not re.fullmatch(r"[A-Za-z][\w+.\-]+", scheme):
        raise bad_source(
            source,
            "To use a local path as a model version source, the run_id request parameter has to be specified and the local "
            "path has to be contained within the artifact directory of the run specified by the run_id. This server keeps "
            "no artifacts at local paths: log the model to a run and register runs:/RUN_ID/PATH",
        )
    path = rest.removeprefix("//") if scheme.lower() == "s3" else rest.removeprefix("/")
    parts = path.rstrip("/").split("/")
    if FORBIDDEN.search(rest) or ".." in fully_unquoted(source).split("/") or any(part in ("", ".", "..") for part in parts):
        host = f"'source' cannot use the '{scheme}' scheme: it addresses a host other than this server's artifact storage. "
        raise bad_source(
            source,
            f"{host if foreign else ''}If supplying a source as an http, https, local file path, ftp, objectstore, or "
            "mlflow-artifacts uri, an absolute path must be provided without relative path references present. Please "
            "provide an absolute path.",
        )
    if scheme not in ("runs", "models", PROXY, "s3"):
        raise bad_source(
            source, "Use runs:/RUN_ID/PATH, models:/NAME/VERSION, mlflow-artifacts:/... or a place in this server's store"
        )
    return scheme, parts


def fully_unquoted(text: str) -> str:
    while (plain := unquote_plus(text)) != text:
        text = plain
    return text


def named_in(source: str) -> dict[str, str]:
    """The run or the logged model that a source names itself, where the request has no words for them."""
    scheme, parts = parse(source)
    if scheme == "runs":
        return {"run_id": parts[0]}
    if scheme == "models" and LOGGED_MODEL.fullmatch("/".join(parts)):
        return {"model_id": parts[0]}
    if scheme == PROXY and FOLDER in parts[1:]:
        owner = parts.index(FOLDER, 1) - 1
        return {"model_id" if owner and parts[owner - 1] == VERSIONS else "run_id": parts[owner]}
    if scheme == "s3" and parts[:2] == [uris.PRODUCT_BUCKET, "runs"] and len(parts) > 2:
        return {"run_id": parts[2]}
    return {}


def is_stored(uri: str) -> bool:
    """Whether a URI is one of this server's store, as the asset graph writes them."""
    return uri.startswith(tuple(f"s3://{bucket}/" for bucket in uris.BUCKETS))


def bad_source(source: str, detail: str) -> HanzoError:
    return invalid(f"Invalid model version source: '{printable(source)}'. {detail}")
