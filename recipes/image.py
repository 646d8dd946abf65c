"""The image that a recipe's pods run, pinned: by a digest, or by a tag that is a commit's or a release's (row G8)."""

import re

REFERENCE = re.compile(
    r"(?:[A-Za-z0-9][A-Za-z0-9.-]*(?::[0-9]+)?/)?[a-z0-9][a-z0-9._/-]*(?::(?P<tag>\w[\w.-]{0,127}))?(?P<digest>@sha256:[0-9a-f]{64})?",
    re.ASCII,
)


def pinned(image: str) -> str:
    """The image as it is. Raises ValueError where it is none, or is another one tomorrow."""
    found = REFERENCE.fullmatch(image)
    if found is None:
        raise ValueError(f"{image[:200]!r} is no image: write REGISTRY/NAME:TAG or REGISTRY/NAME@sha256:DIGEST")
    if found["digest"] is None and found["tag"] in (None, "latest"):
        raise ValueError(f"{image!r} is another image tomorrow: give it the tag of a commit or release, or a digest")
    return image
