"""Why the engine says no: each with one line that says what to do, and the same class on both sides of HTTP."""

from typing import Self

from pydantic import JsonValue

from resources.engine.types import Refusal


class EngineError(Exception):
    """A refusal of the engine. `details` travel with it, so that the client raises what the gateway raised."""

    code = "INTERNAL_ERROR"
    status = 500

    def __init__(self, message: str, **details: JsonValue) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    def to_refusal(self) -> Refusal:
        return Refusal(error_code=self.code, message=self.message, details=self.details)


class BadRequest(EngineError):
    """The request itself is wrong."""

    code = "INVALID_PARAMETER_VALUE"
    status = 400


class UnknownModel(EngineError):
    """No model of this name is deployed."""

    code = "RESOURCE_DOES_NOT_EXIST"
    status = 404


class ChecksumMismatch(EngineError):
    """The file is not the one that was registered; `details` hold `expected` and `found`."""

    code = "CHECKSUM_MISMATCH"
    status = 409

    @classmethod
    def of(cls, path: str, expected: str, found: str) -> Self:
        message = f"{path} has SHA-256 {found}, registered is {expected}: restore the file or register it again"
        return cls(message, path=path, expected=expected, found=found)


class SmokeFailed(EngineError):
    """The model does not load or does not answer; `details` hold the `reason` and, when one failed, the `prompt`."""

    code = "SMOKE_FAILED"
    status = 409

    @classmethod
    def of(cls, model: str, reason: str, prompt: str | None = None) -> Self:
        where = "" if prompt is None else f" on the smoke prompt {prompt!r:.80}"
        return cls(f"{model} was not deployed: {reason}{where}", reason=reason, prompt=prompt)


class EngineUnavailable(EngineError):
    """Nothing answers now; trying again later can help."""

    code = "TEMPORARILY_UNAVAILABLE"
    status = 503


def from_refusal(refusal: Refusal) -> EngineError:
    """The error that the gateway raised."""
    for kind in (BadRequest, UnknownModel, ChecksumMismatch, SmokeFailed, EngineUnavailable):
        if kind.code == refusal.error_code:
            return kind(refusal.message, **refusal.details)
    return EngineError(refusal.message, **refusal.details)
