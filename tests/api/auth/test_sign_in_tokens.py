"""Which tokens authenticate a caller, and how long the IAM's keys are cached."""

import asyncio
import base64
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from api.auth.permissions import Caller
from api.auth.sign_in_tokens import SigningKeys, Tokens, verifying_keys
from resources.errors import ErrorCode, HanzoError
from resources.settings.sections import Auth
from tests.api.auth.iam import Iam, Key
from tests.support.api.forged_tokens import hmac_with_the_public_key, unsigned


@pytest.fixture
def iam() -> Iterator[Iam]:
    with Iam() as running:
        yield running


class Clock:
    """A clock that only the test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def settings(iam: Iam) -> Auth:
    return Auth(iam_url=iam.url, keys_refresh_seconds=300, keys_retry_seconds=10, keys_limit_seconds=3600)


def signed_in(tokens: Tokens, token: str) -> Caller:
    return asyncio.run(tokens.caller(f"Bearer {token}"))


def refused(tokens: Tokens, authorization: str | None) -> HanzoError:
    with pytest.raises(HanzoError) as caught:
        asyncio.run(tokens.caller(authorization))
    assert "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize("number", [0, 1, 2])
def test_token_signed_with_each_key_type_is_accepted(iam: Iam, number: int) -> None:
    claims = iam.claims("ann", "acme", "ml-admin", "ml-viewer", "somebody-elses-role")
    caller = signed_in(Tokens(settings(iam), SigningKeys(settings(iam))), iam.keys[number].sign(claims))
    assert caller == Caller("ann", "acme", frozenset({"ml-admin", "ml-viewer"}))


def changed_payload(iam: Iam, claims: dict[str, Any]) -> str:
    head, _, signature = iam.keys[1].sign(claims).split(".")
    forged = {**claims, "organization": "rival"}
    return f"{head}.{base64.urlsafe_b64encode(json.dumps(forged).encode()).decode().rstrip('=')}.{signature}"


FORGED: dict[str, Callable[[Iam, dict[str, Any]], str]] = {
    "no signature": unsigned,
    "the public key as a secret": hmac_with_the_public_key,
    "another payload": changed_payload,
    "another key of the same name": lambda iam, claims: Key("ec").sign(claims),
    "a key that the IAM does not have": lambda iam, claims: Key("unknown").sign(claims),
    "no key name": lambda iam, claims: jwt.encode(claims, iam.keys[1].private, algorithm="ES256"),
    "a key name that is no text": lambda iam, claims: (
        iam.keys[1]
        .sign(claims)
        .replace(
            iam.keys[1].sign(claims).split(".")[0],
            base64.urlsafe_b64encode(b'{"alg":"ES256","kid":["ec"]}').decode().rstrip("="),
        )
    ),
    "an algorithm that is not the key's": lambda iam, claims: jwt.encode(
        claims, iam.keys[0].private, algorithm="RS512", headers={"kid": "rsa"}
    ),
    "an unknown extension": lambda iam, claims: iam.keys[1].sign(claims, crit=["exp"]),
    "no token at all": lambda iam, claims: "x",
    "a very long token": lambda iam, claims: "x" * 20_000,
    "deeply nested": lambda iam, claims: base64.urlsafe_b64encode(b"[" * 11_000).decode().rstrip("=") + ".e30.e30",
}


@pytest.mark.requirement("W1")
@pytest.mark.parametrize("how", FORGED)
def test_a_forged_token_is_refused(iam: Iam, how: str) -> None:
    tokens = Tokens(settings(iam), SigningKeys(settings(iam)))
    token = FORGED[how](iam, iam.claims("ann", "acme", "ml-admin"))
    error = refused(tokens, f"Bearer {token}")
    assert error.code is ErrorCode.UNAUTHENTICATED
    assert token not in error.message or len(token) == 1


WRONG: dict[str, dict[str, Any]] = {
    "expired": {"exp": time.time() - 3600},
    "not valid yet": {"nbf": time.time() + 3600},
    "issued in the future": {"iat": time.time() + 3600},
    "for another service": {"aud": "hanzo-chat"},
    "by another issuer": {"iss": "https://evil.example"},
    "never expires": {"exp": None},
    "no audience": {"aud": None},
    "no issuer": {"iss": None},
    "endless": {"exp": float("inf")},
    "expires at no time": {"exp": "soon"},
    "no organization": {"organization": None},
    "an organization that is no text": {"organization": ["acme"]},
    "an empty organization": {"organization": ""},
    "no user": {"sub": None},
    "a user that cannot be stored": {"sub": "a\x00b"},
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_claims_are_refused(iam: Iam, what: str) -> None:
    tokens = Tokens(settings(iam), SigningKeys(settings(iam)))
    error = refused(tokens, f"Bearer {iam.token('ann', 'acme', 'ml-admin', **WRONG[what])}")
    assert error.code is ErrorCode.UNAUTHENTICATED


@pytest.mark.parametrize("roles", [[], ["admin"], None, {"ml-admin": True}, 7])
def test_user_without_a_known_role_is_forbidden(iam: Iam, roles: Any) -> None:
    error = refused(Tokens(settings(iam), SigningKeys(settings(iam))), f"Bearer {iam.token('ann', 'acme', roles=roles)}")
    assert error.code is ErrorCode.PERMISSION_DENIED


@pytest.mark.parametrize("header", [None, "", "Basic YW5uOnB3", "Bearer", "Bearer  "])
def test_malformed_authorization_header_is_refused(iam: Iam, header: str | None) -> None:
    assert refused(Tokens(settings(iam), SigningKeys(settings(iam))), header).code is ErrorCode.UNAUTHENTICATED


def test_token_times_tolerate_small_clock_skew(iam: Iam) -> None:
    tokens = Tokens(settings(iam), SigningKeys(settings(iam)))
    now = int(time.time())
    assert signed_in(tokens, iam.token("ann", "acme", "ml-viewer", nbf=now + 10, iat=now + 10, exp=now - 10))


def test_signing_keys_are_refetched_for_unknown_key_ids_at_a_limited_rate(iam: Iam) -> None:
    clock = Clock()
    tokens = Tokens(settings(iam), SigningKeys(settings(iam), clock))
    signed_in(tokens, iam.token("ann", "acme", "ml-viewer"))
    for number in range(5):
        refused(tokens, "Bearer " + Key(f"forged-{number}").sign(iam.claims("eve", "acme", "ml-admin")))
    assert iam.asked == 1
    new = Key("new")
    iam.keys = [new]
    clock.now += 11
    assert signed_in(tokens, new.sign(iam.claims("ann", "acme", "ml-viewer")))
    assert iam.asked == 2


def test_withdrawn_key_invalidates_even_cached_tokens(iam: Iam) -> None:
    clock = Clock()
    tokens = Tokens(settings(iam), SigningKeys(settings(iam), clock))
    old = iam.token("ann", "acme", "ml-viewer")
    signed_in(tokens, old)
    iam.keys = [Key("new")]
    clock.now += 11
    refused(tokens, "Bearer " + Key("forged").sign(iam.claims("eve", "acme", "ml-admin")))
    assert refused(tokens, f"Bearer {old}").code is ErrorCode.UNAUTHENTICATED


def test_cached_keys_stay_valid_until_their_limit_while_iam_is_down(iam: Iam) -> None:
    clock = Clock()
    tokens = Tokens(settings(iam), SigningKeys(settings(iam), clock))
    token, other = (iam.token(user, "acme", "ml-viewer") for user in ("ann", "bob"))
    signed_in(tokens, token)
    iam.status = 500
    clock.now += 3000
    assert signed_in(tokens, token) and signed_in(tokens, other)
    clock.now += 700
    assert refused(tokens, f"Bearer {token}").code is ErrorCode.TEMPORARILY_UNAVAILABLE
    iam.status = 200
    clock.now += 11
    assert signed_in(tokens, token)


def test_unreachable_iam_is_reported_as_temporarily_unavailable(iam: Iam) -> None:
    iam.go_away()
    error = refused(Tokens(settings(iam), SigningKeys(settings(iam))), f"Bearer {iam.token('ann', 'acme', 'ml-viewer')}")
    assert error.code is ErrorCode.TEMPORARILY_UNAVAILABLE


def test_a_redirect_is_not_followed(iam: Iam) -> None:
    with Iam() as evil:
        iam.status, iam.target = 302, f"{evil.url}/.well-known/jwks.json"
        token = evil.keys[1].sign(iam.claims("eve", "acme", "ml-admin"))
        error = refused(Tokens(settings(iam), SigningKeys(settings(iam))), f"Bearer {token}")
        assert error.code is ErrorCode.TEMPORARILY_UNAVAILABLE
        assert evil.asked == 0


def test_only_strong_signature_keys_are_accepted_from_the_jwks() -> None:
    good = Key("good", "RS256").jwk
    short = Key("short", "RS256")
    short.private = rsa.generate_private_key(65537, 1024)
    entries = [
        good,
        {**good, "kid": "for encryption", "use": "enc"},
        {**good, "kid": "of another algorithm", "alg": "PS256"},
        {**good, "kid": 7},
        {name: value for name, value in good.items() if name != "kid"},
        {**good, "kid": "broken", "n": "!"},
        short.jwk,
        {"kty": "oct", "kid": "secret", "k": "c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0"},
        {"kty": "EC", "crv": "P-521", "kid": "other curve"},
        {"kty": ["RSA"], "kid": "odd"},
    ]
    assert set(verifying_keys({"keys": entries})) == {"good"}
