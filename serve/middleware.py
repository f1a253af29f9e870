"""The checks that every request passes before a route sees it, and the headers that every answer has."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.api_errors import ApiError
from serve.settings import Settings, address_of, is_loopback

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")  # a proxy names its client in one of these
log = logging.getLogger(__name__)


def host_of(address: str) -> str:
    """Returns the host of an address without its port; "" if it is not an address."""
    try:
        return urlsplit(f"//{address}").hostname or ""
    except ValueError:
        return ""


class Answer:
    """The answer to a request: adds HEADERS to what the application sends, and records whether the answer has
    started and whether it is complete."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = self.complete = self.is_stream = False

    async def send(self, message: Message) -> None:
        """Sends a message of the application."""
        if message["type"] == "http.response.start":
            self.started = True
            headers = MutableHeaders(scope=message)
            self.is_stream = headers.get("content-type", "").startswith("text/event-stream")
            for name, value in HEADERS.items():
                headers[name] = value
        else:
            self.complete = not message.get("more_body", False)
        await self._send(message)


class AccessMiddleware:
    """Refuses requests for other hosts and without the key. Answers in place of the application if its code
    raises an exception, or if the server ends before the answer is complete.

    Pages of other sites cannot call the server: a browser asks it first before such a page sends JSON, the
    only type of body that is taken (serve.images.read_body), and no answer allows it."""

    def __init__(self, app: ASGIApp, settings: Settings, open_paths: Collection[str]) -> None:
        """open_paths: paths that need no key."""
        self._app, self._settings, self._open = app, settings, frozenset(open_paths)
        self._names = {"localhost", *(name.lower() for name in settings.server_names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = Answer(send)
        try:
            headers = Headers(scope=scope)
            self._check_host(headers)
            # Behind a prefix, such as Ray's route_prefix, the path may begin with it.
            if scope["path"].removeprefix(scope.get("root_path", "")) not in self._open:
                self._check_key(headers)
            self._check_client(scope.get("client"), headers)
            await self._app(scope, receive, answer.send)
        except ApiError as error:
            await error.response(scope, receive, answer.send)
        except asyncio.CancelledError:  # uvicorn cancels requests that it may not wait for any longer
            scope["app"].state.cut += 1
            failure = ApiError(503, "the server ends", code="server_shutting_down")
            if not answer.started:
                await failure.response(scope, receive, answer.send)
            elif answer.is_stream and not answer.complete:
                await answer.send({"type": "http.response.body", "body": failure.event})
            else:
                raise
        except Exception:
            if answer.started:
                raise
            log.exception("%s %s failed", scope["method"], scope["path"])
            failure = ApiError(500, "internal error; the server's log has more", code="server_error")
            await failure.response(scope, receive, answer.send)

    def _check_client(self, client: tuple[str, int] | None, headers: Headers) -> None:
        """Raises ApiError for a client of another machine if there is no key. `main.py serve` does not listen
        for such clients, but Ray's proxy may listen at any address, and the requests that a proxy on this
        machine forwards come from this machine."""
        if self._settings.api_key is not None:
            return
        if any(name in headers for name in FORWARDED):
            raise ApiError(403, "this server has no key, so it answers no request that a proxy forwards")
        if client is not None and not is_loopback(client[0]):
            raise ApiError(403, "this server has no key, so it answers clients of its own machine alone")

    def _check_host(self, headers: Headers) -> None:
        """Raises ApiError for a request that names another host."""
        host = headers.get("host")
        if host is None:  # a browser always sends it; HTTP/1.0, in which proxies ask for /health, need not
            return
        name = host_of(host)
        # Another site can make its DNS name resolve to this machine, so that its pages may call the server. A
        # request by address cannot come from such a page.
        if name not in self._names and address_of(name) is None:
            raise ApiError(403, f"host {host!r}: this server does not answer to that name")

    def _check_key(self, headers: Headers) -> None:
        """Raises ApiError for a request without the key, if there is one."""
        if self._settings.api_key is None:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(key.encode("latin-1", "replace"), self._settings.api_key.encode())
        if not same or scheme.lower() != "bearer":
            text = "the key is missing or wrong: send it as `Authorization: Bearer KEY`"
            raise ApiError(401, text, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
