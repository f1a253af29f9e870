"""Runs the application under uvicorn, with timeouts and a shutdown that uvicorn lacks."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from serve.api_errors import ApiError
from serve.settings import Settings

SIGNALS = (signal.SIGINT, signal.SIGTERM)
MAX_HEAD = 2**15  # bytes of the headers of a request
BACKLOG = 2048  # connections that may wait to be accepted
UNSENT = 2**16  # bytes of an answer that the kernel takes before it can send them


class TimedProtocol(H11Protocol):
    """HTTP/1.1 that closes a connection if a whole request does not arrive in time, or if the client no
    longer reads the answer.

    uvicorn has a timer for idle connections between two requests, but none until the first one and none for
    headers that stop midway.
    """

    timeout_s: float  # set by protocol_of
    _due: asyncio.TimerHandle | None = None
    _unread = 0  # bytes of answers that were still to be sent when the timer was started

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._set_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._set_timer()

    def _set_timer(self) -> None:
        """Starts the timer if the server waits for a request, or for the rest of one that it answered early,
        and stops it while a request is being answered. A running timer is not restarted by further bytes."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
        elif self._due is None:
            self._unread = self.transport.get_write_buffer_size()
            self._due = self.loop.call_later(self.timeout_s, self._expire)

    def _expire(self) -> None:
        """Closes the connection, unless the client has read a part of an answer since the timer was started,
        but not yet all of it."""
        self._due = None
        if 0 < self.transport.get_write_buffer_size() < self._unread:
            self._set_timer()
        else:
            self.transport.abort()

    def _stop_timer(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def send_400_response(self, msg: str) -> None:
        """Answers as uvicorn does, in the form of the other errors."""
        body = json.dumps(ApiError(400, msg).content).encode()
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        headers.append((b"content-length", str(len(body)).encode()))
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            start = h11.Response(status_code=400, headers=headers)
            for event in (start, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def protocol_of(timeout_s: float) -> type[TimedProtocol]:
    """Returns the protocol with a timeout, for which uvicorn has no setting."""
    return type("Protocol", (TimedProtocol,), {"timeout_s": timeout_s})


class Server(uvicorn.Server):
    """uvicorn that returns after a signal instead of raising it again. A second signal cuts off the requests
    that are still being finished."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # From Python 3.12 on their wait_closed(), which uvicorn calls last, waits for open connections even
        # after a second signal. uvicorn itself waits for connections before.
        for server in self.servers:
            server.close()
        self.servers = []
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn then skips this call, without which the application ends in a traceback
            await self.lifespan.shutdown()


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at an address. Raises OSError if it cannot be had.

    It listens before the model is loaded: a port that another server has is named at once, and a client that
    comes early waits instead of being refused. The kernel takes few bytes of an answer in advance, so that
    what is left of it shows how fast the client reads.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def configure(app: FastAPI, settings: Settings, grace_s: float) -> uvicorn.Config:
    """Returns uvicorn's configuration; after the signal to end, requests have grace_s seconds to finish."""
    return uvicorn.Config(
        app,
        http=protocol_of(settings.timeout_s),
        backlog=BACKLOG,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=math.ceil(settings.timeout_s),
        timeout_graceful_shutdown=math.ceil(grace_s),
        h11_max_incomplete_event_size=MAX_HEAD,
    )


def run(app: FastAPI, settings: Settings, listener: socket.socket, grace_s: float) -> bool:
    """Serves until SIGTERM or SIGINT, then finishes what was accepted.

    Returns whether all of it was finished within grace_s seconds.
    """
    asyncio.run(Server(configure(app, settings, grace_s)).serve(sockets=[listener]))
    return app.state.cut == 0
