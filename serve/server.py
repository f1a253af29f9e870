"""Runs the application under uvicorn, with a shutdown that uvicorn lacks."""

from __future__ import annotations

import asyncio
import math
import socket
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from serve.settings import Settings


class Server(uvicorn.Server):
    """uvicorn that returns after a signal instead of raising it again. A second signal cuts off the requests
    that are still being finished."""

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
    comes early waits instead of being refused.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    ipv6 = family == socket.AF_INET6
    return socket.create_server((host, port), family=family, dualstack_ipv6=ipv6)


def configure(app: Starlette, settings: Settings, grace_s: float) -> uvicorn.Config:
    """Returns uvicorn's configuration; after the signal to end, requests have grace_s seconds to finish."""
    return uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=math.ceil(settings.timeout_s),
        timeout_graceful_shutdown=math.ceil(grace_s),
    )


def run(app: Starlette, settings: Settings, listener: socket.socket, grace_s: float) -> bool:
    """Serves until SIGTERM or SIGINT, then finishes what was accepted.

    Returns whether all of it was finished within grace_s seconds.
    """
    asyncio.run(Server(configure(app, settings, grace_s)).serve(sockets=[listener]))
    return app.state.cut == 0
