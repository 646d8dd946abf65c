"""`--since`: a topic's address that goes on where a version's messages ended."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

from hanzo_ml.cli.connection import Refused


def continued(address: str, version: Mapping[str, Any]) -> str:
    """The address, from behind the messages of a version on. Raises Refused where that is not of the same topic."""
    parts = urlsplit(address)
    if parts.scheme != "kafka" or "from" in parse_qs(parts.query):
        raise Refused("--since goes with --path kafka://BROKER/TOPIC without from=, and says where its messages begin")
    reference = f"{version['name']}@{version['version']}"
    for origin in version["lineage"].get("origins", ()):
        before = urlsplit(origin)
        if before.scheme == "kafka" and before.path.strip("/") == parts.path.strip("/"):
            first = f"from={parse_qs(before.query)['until'][0]}"
            return parts._replace(query="&".join(filter(None, (first, parts.query)))).geturl()
    raise Refused(f"{reference} was not made of the topic '{parts.path.strip('/')}': give --since a version that was")
