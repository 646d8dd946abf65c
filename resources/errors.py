"""All errors that a user reads, with code and HTTP status.

`api` and the inference gateway turn these into their response bodies; MLflow's shape is `{"error_code", "message"}`.
"""

from enum import StrEnum
from typing import ClassVar, Self

from pydantic import JsonValue


class ErrorCode(StrEnum):
    """MLflow's error codes and some of our own; their HTTP status is in `HTTP_STATUS`."""

    INVALID_PARAMETER_VALUE = "INVALID_PARAMETER_VALUE"
    BAD_REQUEST = "BAD_REQUEST"
    RESOURCE_ALREADY_EXISTS = "RESOURCE_ALREADY_EXISTS"
    RESOURCE_DOES_NOT_EXIST = "RESOURCE_DOES_NOT_EXIST"
    ENDPOINT_NOT_FOUND = "ENDPOINT_NOT_FOUND"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    RESOURCE_CONFLICT = "RESOURCE_CONFLICT"
    INVALID_STATE = "INVALID_STATE"
    DATA_LOSS = "DATA_LOSS"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    NOT_IMPLEMENTED = "NOT_IMPLEMENTED"
    INTERNAL_ERROR = "INTERNAL_ERROR"
    TEMPORARILY_UNAVAILABLE = "TEMPORARILY_UNAVAILABLE"
    STORAGE_DENIED = "STORAGE_DENIED"
    CHECKSUM_MISMATCH = "CHECKSUM_MISMATCH"
    SMOKE_FAILED = "SMOKE_FAILED"


HTTP_STATUS = {
    ErrorCode.INVALID_PARAMETER_VALUE: 400,
    ErrorCode.BAD_REQUEST: 400,
    ErrorCode.RESOURCE_ALREADY_EXISTS: 400,
    ErrorCode.RESOURCE_DOES_NOT_EXIST: 404,
    ErrorCode.ENDPOINT_NOT_FOUND: 404,
    ErrorCode.UNAUTHENTICATED: 401,
    ErrorCode.PERMISSION_DENIED: 403,
    ErrorCode.RESOURCE_CONFLICT: 409,
    ErrorCode.INVALID_STATE: 409,
    ErrorCode.DATA_LOSS: 409,
    ErrorCode.RESOURCE_EXHAUSTED: 507,
    ErrorCode.NOT_IMPLEMENTED: 501,
    ErrorCode.INTERNAL_ERROR: 500,
    ErrorCode.TEMPORARILY_UNAVAILABLE: 503,
    ErrorCode.STORAGE_DENIED: 503,
    ErrorCode.CHECKSUM_MISMATCH: 409,
    ErrorCode.SMOKE_FAILED: 409,
}


class HanzoError(Exception):
    """An error for users: `message` is one line that says what to do."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    @property
    def status(self) -> int:
        return HTTP_STATUS[self.code]


def invalid(message: str) -> HanzoError:
    return HanzoError(ErrorCode.INVALID_PARAMETER_VALUE, message)


def not_found(message: str) -> HanzoError:
    return HanzoError(ErrorCode.RESOURCE_DOES_NOT_EXIST, message)


def already_exists(message: str) -> HanzoError:
    return HanzoError(ErrorCode.RESOURCE_ALREADY_EXISTS, message)


def conflict(message: str) -> HanzoError:
    return HanzoError(ErrorCode.RESOURCE_CONFLICT, message)


class EngineError(HanzoError):
    """An error of the inference engine; `details` let an HTTP client raise the same error."""

    kind: ClassVar[ErrorCode] = ErrorCode.INTERNAL_ERROR

    def __init__(self, message: str, **details: JsonValue) -> None:
        super().__init__(self.kind, message)
        self.details = details


class BadRequest(EngineError):
    """The request itself is wrong."""

    kind = ErrorCode.INVALID_PARAMETER_VALUE


class UnknownModel(EngineError):
    """No model of this name is deployed."""

    kind = ErrorCode.RESOURCE_DOES_NOT_EXIST


class ChecksumMismatch(EngineError):
    """The file differs from the registered one; `details` hold `expected` and `found`."""

    kind = ErrorCode.CHECKSUM_MISMATCH

    @classmethod
    def with_details(cls, path: str, expected: str, found: str) -> Self:
        message = f"{path} has SHA-256 {found}, registered is {expected}: restore the file or register it again"
        return cls(message, path=path, expected=expected, found=found)


class SmokeFailed(EngineError):
    """The model does not load or answer; `details` hold `reason` and the failed `prompt`."""

    kind = ErrorCode.SMOKE_FAILED

    @classmethod
    def with_details(cls, model: str, reason: str, prompt: str | None = None) -> Self:
        where = "" if prompt is None else f" on the smoke prompt {prompt!r:.80}"
        return cls(f"{model} was not deployed: {reason}{where}", reason=reason, prompt=prompt)


class EngineUnavailable(EngineError):
    """The engine is unreachable; a later attempt can succeed."""

    kind = ErrorCode.TEMPORARILY_UNAVAILABLE
