"""Where the files of an experiment, a run and a logged model are, as URIs that MLflow's clients read.

Without a wish they are behind this server's artifact proxy, at `mlflow-artifacts:/EXPERIMENT/...`. A client may name another
place when it makes an experiment (`artifact_location`):

- `mlflow-artifacts:/PATH` is behind the proxy too, under a name of the client's own;
- any other is kept and given back, as in MLflow: there the *client* reads and writes, with its own rights. This server
  never opens such a place, so nobody makes it read a file or call a host (the SSRF and path classes of MLflow's past).

What belongs here: which URIs there can be. What does not: whose files a path of the proxy is (`artifact_owners`).
"""

import posixpath
import re
from urllib.parse import unquote, urlparse, urlsplit, urlunsplit

from recipes.storage import uris
from resources.errors import HanzoError, invalid
from resources.metadata.tracking_rules import checked_text, printable

PROXY = "mlflow-artifacts"
VERSIONS = "models"
"""The first part of a proxied path that names a registered model's files."""
MAX_LENGTH = 2048
HOSTS = ("http", "https", "ftp", "sftp", "hdfs", "viewfs", "r2", "b2", "abfss")
"""Schemes whose places MLflow 3.17 refuses too: whoever reads one is made to call that host."""
NAMES = ("runs", "models")
"""Schemes that name things of a tracking server, and no place."""
RESERVED = re.compile(r"\d+")
"""Numbers are experiments."""
UNUSUAL = re.compile(r"[\x00-\x1f\x7f\\#?]")


def default_location(experiment_id: int) -> str:
    return proxied_uri(str(experiment_id))


def run_files(location: str, run_id: str) -> str:
    """Where the files of a run of an experiment at `location` are."""
    return below(location, f"{run_id}/artifacts")


def model_files(location: str, model_id: str) -> str:
    return below(location, f"{VERSIONS}/{model_id}/artifacts")


def below(location: str, path: str) -> str:
    """A place below another: the path goes before the query, if there is one."""
    if is_proxied(location):
        root = proxied_path(location)
        return proxied_uri(f"{root}/{path}" if root else path)
    scheme, host, root, query, _ = urlsplit(location)
    if not scheme:
        return f"{location.rstrip('/')}/{path}"
    return urlunsplit((scheme, host, f"{root.rstrip('/')}/{path}", query, ""))


def is_proxied(uri: str) -> bool:
    """Whether the files at a URI are in this server's store."""
    return uri.partition(":")[0] == PROXY


def proxied_uri(path: str) -> str:
    """The URI of a path of the artifact proxy; `proxied_path` is its inverse."""
    return f"{PROXY}:/{path}"


def proxied_path(uri: str) -> str:
    """The path of the artifact proxy that an `mlflow-artifacts:` URI names."""
    return uri.partition(":")[2].strip("/")


def check_here(uri: str) -> None:
    """Raises a 400 where files are at a place that only their clients read."""
    if not is_proxied(uri):
        raise invalid(
            f"These artifacts are at {printable(uri)}, where this server does not look: "
            "read them with an MLflow client that may read there"
        )


def in_folder(location: str, folder: str) -> str:
    """A relative path as an absolute one, also that of a `file:` URI; everything else as it is."""
    path = location.removeprefix("file:")
    if not path or ":" in path or path.startswith("/"):
        return location
    return f"{'' if path == location else 'file://'}{posixpath.join(folder, path)}"


def checked_location(location: str) -> str:
    """The place of an experiment's files, as the client named it.

    Raises:
        HanzoError: 400 where it is no place for files, or a place that is not the client's to choose.
    """
    if len(location) > MAX_LENGTH:
        raise invalid(
            f"Invalid artifact path length. The length of the artifact path cannot be greater than {MAX_LENGTH} characters."
        )
    checked_text(location, "artifact_location")
    if not location:
        return location
    try:
        scheme, host, path, query, fragment = urlsplit(location)
        params = urlparse(location).params
    except ValueError:
        raise refused(location, "It is no URI") from None
    if fragment or params:
        raise invalid("'artifact_location' URL can't include fragments or params.")
    if ".." in fully_unquoted(query):
        raise invalid("Invalid query string")
    if scheme in NAMES:
        raise invalid(f"Artifact location cannot be a {scheme}:/ URI. Given: '{printable(location)}'")
    if scheme in HOSTS or (scheme == PROXY and host):
        raise refused(location, f"A {scheme} URI with a host names a server: use a bucket or {PROXY}:/PATH")
    if scheme == PROXY:
        return checked_proxied(location, path)
    if scheme == "s3" and host in uris.BUCKETS:  # datasets, checkpoints and models are no client's to write to
        raise refused(location, f"It is this server's own store: leave it out, or use {PROXY}:/PATH")
    if scheme in ("", "file") and not host and not path.startswith("/"):
        raise refused(location, f"A relative path names no place here: use a URI, such as {PROXY}:/PATH")
    return location


def checked_proxied(location: str, path: str) -> str:
    parts = path.strip("/").split("/")
    if UNUSUAL.search(location) or unquote(location) != location or (path.strip("/") and {"", ".", ".."} & set(parts)):
        raise refused(location, "Its path must be one that means the same to everybody")
    if parts[0] == VERSIONS or RESERVED.fullmatch(parts[0]):
        raise refused(location, "Numbers and 'models' are taken: begin its path with another name")
    return location


def fully_unquoted(text: str) -> str:
    while (plain := unquote(text)) != text:
        text = plain
    return text


def refused(location: str, why: str) -> HanzoError:
    return invalid(f"Invalid value '{printable(location)}' for parameter 'artifact_location' supplied: {why}")
