"""Errors in the form of OpenAI's API: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from adt_tree.errors import reason

TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An error that the client gets as an answer: the status, OpenAI's fields and extra headers."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, dict(headers or {})

    @property
    def content(self) -> dict[str, Any]:
        usual = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = TYPES.get(self.status, usual)
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> Response:
        return json_response(self.content, self.status, self.headers)

    @property
    def event(self) -> bytes:
        return f"data: {json.dumps(self.content)}\n\n".encode()


def invalid(field: str, text: object) -> ApiError:
    """Returns the error of a field whose value cannot be taken."""
    return ApiError(400, f"{field}: {text}", field, "invalid_value")


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Returns content as JSON in ASCII, which can hold any text that a client may send."""
    return Response(json.dumps(content), status, headers, "application/json")


def failure(error: BaseException) -> ApiError:
    """Returns an error in the form that the client gets. All but an ApiError become status 500, one line."""
    return error if isinstance(error, ApiError) else ApiError(500, reason(error), code="server_error")


async def from_routes(request: Request, error: Exception) -> Response:
    """Answers an ApiError that a route raised."""
    return failure(error).response


async def from_framework(request: Request, error: Exception) -> Response:
    """Answers an error of starlette in OpenAI's form."""
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path}: {error.detail}"
    return ApiError(error.status_code, text, headers=error.headers).response


# serve.middleware answers all other exceptions.
HANDLERS = {ApiError: from_routes, HTTPException: from_framework}
