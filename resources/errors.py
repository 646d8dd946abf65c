"""The one error shape: MLflow's `{"error_code", "message"}`, raised below and turned into HTTP by `api`."""

from enum import StrEnum


class ErrorCode(StrEnum):
    """Error codes of MLflow's REST API that this product uses; the HTTP status of each is in `HTTP_STATUS`."""

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
}


class HanzoError(Exception):
    """A refusal that a user reads: `message` is one line that says what to do."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def invalid(message: str) -> HanzoError:
    return HanzoError(ErrorCode.INVALID_PARAMETER_VALUE, message)


def not_found(message: str) -> HanzoError:
    return HanzoError(ErrorCode.RESOURCE_DOES_NOT_EXIST, message)


def already_exists(message: str) -> HanzoError:
    return HanzoError(ErrorCode.RESOURCE_ALREADY_EXISTS, message)


def conflict(message: str) -> HanzoError:
    return HanzoError(ErrorCode.RESOURCE_CONFLICT, message)
