"""`exit.json`: how the newest attempt of a job ended, for the supervisor and for people."""

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.legacy_exit_reason import reason_of_message


class ExitDocument(BaseModel):
    """How an attempt ended. `code` is missing where the program did not choose one: it was killed, or had no disk space.

    A document of an older release has no reason, and one of a newer release may have a reason that is not known here: both
    are classified by their code and message.
    """

    model_config = ConfigDict(frozen=True)

    code: int | None
    message: str
    reason: ExitReason

    @model_validator(mode="before")
    @classmethod
    def classify_without_reason(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("reason") not in set(ExitReason):
            code, message = value.get("code"), str(value.get("message", ""))
            known = code if isinstance(code, int) else None
            return {**value, "reason": reason_of_message(known, message)}
        return value
