"""Whether callers sign in, by the settings."""

from typing import TYPE_CHECKING

from resources.settings import Settings

if TYPE_CHECKING:
    from api.auth.tokens import Tokens


def token_verifier(settings: Settings) -> "Tokens | None":
    """What tells who is calling; None where there is no sign-in."""
    if not settings.auth.verify_tokens:
        return None
    # The cryptography behind it costs a laptop, which needs none of it, a tenth of a second at every start.
    from api.auth.jwks import Keys
    from api.auth.tokens import Tokens

    return Tokens(settings.auth, Keys(settings.auth))
