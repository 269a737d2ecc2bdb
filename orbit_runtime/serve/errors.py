"""Errors in the form that OpenAI's clients read: `{"error": {message, type, param, code}}`."""

from __future__ import annotations

from typing import Any

from orbit_runtime.errors import DataError, GateError, ModelError, OrbitError, UsageError

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "server_error",
}


class APIError(Exception):
    """An error response. Example: `APIError(404, "there is no model 'x'", param="model")`"""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def to_json(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def from_orbit(error: OrbitError) -> APIError:
    """A client's mistake is 400, a refused adapter 422; everything else is the server's fault."""
    if isinstance(error, ModelError | GateError):
        return APIError(422, str(error), code="adapter_refused")
    if isinstance(error, DataError | UsageError):
        return APIError(400, str(error))
    return APIError(500, str(error), code=type(error).__name__)
