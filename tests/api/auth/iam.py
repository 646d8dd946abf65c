"""A small IAM with real keys and tokens, and an HTTP server for its JWKS.

It can rotate its keys and stop.
"""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

AUDIENCE = "hanzo-ml"
PrivateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


class Key:
    """A key pair with its id."""

    def __init__(self, kid: str, algorithm: str = "ES256") -> None:
        self.kid = kid
        self.algorithm = algorithm
        self.private: PrivateKey
        if algorithm == "RS256":
            self.private = rsa.generate_private_key(65537, 2048)
        elif algorithm == "EdDSA":
            self.private = ed25519.Ed25519PrivateKey.generate()
        else:
            self.private = ec.generate_private_key(ec.SECP256R1())

    @property
    def jwk(self) -> dict[str, Any]:
        public: Any = self.private.public_key()
        kinds: dict[str, Any] = {"RS256": RSAAlgorithm, "ES256": ECAlgorithm, "EdDSA": OKPAlgorithm}
        return {**json.loads(kinds[self.algorithm].to_jwk(public)), "kid": self.kid, "use": "sig", "alg": self.algorithm}

    @property
    def public_pem(self) -> bytes:
        public = self.private.public_key()
        return public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)

    def sign(self, claims: dict[str, Any], **headers: Any) -> str:
        return jwt.encode(claims, self.private, algorithm=self.algorithm, headers={"kid": self.kid, **headers})


class Iam:
    """Serves `/.well-known/jwks.json` on loopback."""

    def __init__(self) -> None:
        self.keys = [Key("rsa", "RS256"), Key("ec"), Key("ed", "EdDSA")]
        self.asked = 0
        self.status = 200
        self.target = ""
        iam = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                iam.asked += 1
                body = json.dumps({"keys": [key.jwk for key in iam.keys]}).encode()
                self.send_response(iam.status if self.path == "/.well-known/jwks.json" else 404)
                if iam.target:
                    self.send_header("Location", iam.target)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.go_away()

    def go_away(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()

    def claims(self, user: str, org: str, *roles: str, **changed: Any) -> dict[str, Any]:
        now = int(time.time())
        usual = {
            "iss": self.url,
            "aud": AUDIENCE,
            "sub": user,
            "organization": org,
            "roles": list(roles),
            "iat": now,
            "nbf": now,
            "exp": now + 3600,
        }
        return {name: value for name, value in {**usual, **changed}.items() if value is not None}

    def token(self, user: str, org: str, *roles: str, **changed: Any) -> str:
        return self.keys[1].sign(self.claims(user, org, *roles, **changed))
