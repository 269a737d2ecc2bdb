"""Errors of Orbit as the responses that OpenAI's clients read: `{"error": {message, type, param, code}}`."""

from __future__ import annotations

from orbit_runtime.errors import DataError, GateError, ModelError, OrbitError, OutputError, UsageError
from orbit_runtime.ports.guard import APIError


def from_orbit(error: OrbitError) -> APIError:
    """A client's mistake is 400, a refused adapter 422; everything else is the server's fault."""
    if isinstance(error, ModelError | GateError | OutputError):
        return APIError(422, str(error), code="adapter_refused")
    if isinstance(error, DataError | UsageError):
        return APIError(400, str(error))
    return APIError(500, str(error), code=type(error).__name__)
