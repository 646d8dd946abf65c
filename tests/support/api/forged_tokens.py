"""Sign-in tokens that must be refused."""

import base64
import hashlib
import hmac
import json
from typing import Any

from tests.api.auth.iam import Iam


def unsigned(iam: Iam, claims: dict[str, Any]) -> str:
    parts = [{"alg": "none", "kid": "ec", "typ": "JWT"}, claims]
    return ".".join([*(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts), ""])


def hmac_with_the_public_key(iam: Iam, claims: dict[str, Any]) -> str:
    parts = [{"alg": "HS256", "kid": "rsa", "typ": "JWT"}, claims]
    text = ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts)
    digest = hmac.new(iam.keys[0].public_pem, text.encode(), hashlib.sha256).digest()
    return f"{text}.{base64.urlsafe_b64encode(digest).decode().rstrip('=')}"
