"""`make pin-images`: pin images in Containerfiles and manifests to their registries' digests.

An image whose registry does not answer keeps its tag and is reported; the command then exits with 1.
"""

from __future__ import annotations

import hashlib
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parent.parent
FILES = ("deploy/images/*/Containerfile", "deploy/kubernetes/**/*.yaml")
REFERENCE = re.compile(
    r"(?P<before>^ARG BASE_IMAGE=|\b(?:default_)?image: [\"']?)"
    r"(?P<tagged>[\w./:-]+)(?:@sha256:[0-9a-f]{64})?(?=[\"'\s},]|$)",
    re.MULTILINE,
)
KUSTOMIZED = re.compile(
    r"(?P<before>^(?P<indent> *)- name: (?P<name>[\w./:-]+)\n(?P=indent)  newTag: (?P<tag>[\w.-]+)\n)"
    r"(?: +digest: sha256:[0-9a-f]{64}\n)?",
    re.MULTILINE,
)
"""An entry of `images` in a kustomization, which overrides the manifests."""
INDEX_TYPES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
MANIFEST_TYPES = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
TIMEOUT_SECONDS = 30.0


class Unresolved(Exception):
    """Raised when the digest of an image cannot be determined."""


@dataclass(frozen=True)
class Image:
    """An image name as Docker interprets it: the defaults are Docker Hub and `latest`."""

    registry: str
    repository: str
    tag: str

    @classmethod
    def parse(cls, tagged: str) -> Image:
        first, slash, rest = tagged.partition("/")
        has_registry = slash and (first == "localhost" or "." in first or ":" in first)
        registry, path = (first, rest) if has_registry else ("docker.io", tagged)
        repository, _, tag = path.partition(":")
        if registry == "docker.io" and "/" not in repository:
            repository = f"library/{repository}"
        return cls(registry, repository, tag or "latest")

    @property
    def url(self) -> str:
        host = "registry-1.docker.io" if self.registry == "docker.io" else self.registry
        scheme = "http" if host.partition(":")[0] in ("localhost", "127.0.0.1") else "https"
        return f"{scheme}://{host}/v2/{self.repository}/manifests/{self.tag}"


@dataclass(frozen=True)
class Pin:
    digest: str
    platforms: tuple[str, ...]


@cache
def resolve(tagged: str) -> Pin:
    """Return the digest and platforms from the registry. Raises Unresolved."""
    image = Image.parse(tagged)
    headers = {"Accept": ", ".join((*INDEX_TYPES, *MANIFEST_TYPES))}
    try:
        with httpx.Client(timeout=TIMEOUT_SECONDS, follow_redirects=True) as http:
            answer = http.get(image.url, headers=headers)
            if answer.status_code == httpx.codes.UNAUTHORIZED:
                token = fetch_token(http, answer.headers.get("WWW-Authenticate", ""))
                answer = http.get(image.url, headers=headers | {"Authorization": f"Bearer {token}"})
            answer.raise_for_status()
            document = answer.json()
    except httpx.HTTPStatusError as problem:
        raise Unresolved(f"{image.registry} answers {problem.response.status_code}") from None
    except (httpx.HTTPError, ValueError) as problem:
        raise Unresolved(f"{image.registry} cannot be reached: {problem}") from None
    digest = f"sha256:{hashlib.sha256(answer.content).hexdigest()}"
    if answer.headers.get("Docker-Content-Digest", digest) != digest:
        raise Unresolved(f"{image.registry} sent a manifest whose digest differs from the one it states")
    platforms = [entry.get("platform", {}) for entry in document.get("manifests", [])]
    known = {f"{each['os']}/{each['architecture']}" for each in platforms if each.get("os", "unknown") != "unknown"}
    return Pin(digest, tuple(sorted(known)))


def fetch_token(http: httpx.Client, challenge: str) -> str:
    """Return an anonymous token from the registry's token service."""
    parameters = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    if "realm" not in parameters:
        raise Unresolved("the registry requires an unsupported authentication method")
    answer = http.get(parameters.pop("realm"), params=parameters).raise_for_status().json()
    return str(answer.get("token") or answer["access_token"])


def pin_file(path: Path, problems: dict[str, str]) -> None:
    """Pin a file's images in place; add a reason to `problems` for each unresolved one."""

    def pinned(match: re.Match[str]) -> str:
        tagged = tagged_name(match)
        try:
            digest = resolve(tagged).digest
        except Unresolved as problem:
            problems[tagged] = str(problem)
            return match[0]
        if match.re is KUSTOMIZED:
            return f"{match['before']}{match['indent']}  digest: {digest}\n"
        return f"{match['before']}{tagged}@{digest}"

    text = path.read_text()
    if (changed := KUSTOMIZED.sub(pinned, REFERENCE.sub(pinned, text))) != text:
        path.write_text(changed)


def tagged_name(match: re.Match[str]) -> str:
    return match["tagged"] if match.re is REFERENCE else f"{match['name']}:{match['tag']}"


def list_images(root: Path) -> dict[str, list[Path]]:
    """Return the files that name each image."""
    found: dict[str, list[Path]] = {}
    for path in sorted(path for pattern in FILES for path in root.glob(pattern)):
        text = path.read_text()
        for match in (*REFERENCE.finditer(text), *KUSTOMIZED.finditer(text)):
            found.setdefault(tagged_name(match), []).append(path)
    return found


def main(root: Path = ROOT) -> int:
    images = list_images(root)
    problems: dict[str, str] = {}
    for path in sorted({path for paths in images.values() for path in paths}):
        pin_file(path, problems)
    for tagged in images:
        if tagged in problems:
            print(f"{tagged}: not pinned: {problems[tagged]}", file=sys.stderr)
        else:
            pin = resolve(tagged)
            print(f"{tagged}@{pin.digest} ({', '.join(pin.platforms) or 'one platform'})")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
