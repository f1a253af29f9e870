"""One image that a client waits for, and the images of a request with the news of their progress."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from adt_tree.engine_cache import EngineKey
from adt_tree.roles import Request
from adt_tree.settings import Sampling
from models.target import EncodedPrompt


@dataclass(frozen=True, slots=True)
class News:
    """A message about an image: `codes` of its codes are committed, or it failed with `error`."""

    job: Job
    codes: int
    error: Exception | None = None


@dataclass(eq=False, slots=True)
class Job:
    """An image of a request. To the engine it is the adt_tree.roles.Client of that image.

    The decoding thread writes `codes` and calls tell() and fail(); the event loop's thread sets `gone`, and
    `failed` if no picture can be made of the codes.
    """

    order: Order
    index: int  # number of the image in its order
    prompt: EncodedPrompt
    seed: int
    sampling: Sampling
    engine: EngineKey  # of the engine that decodes it
    marks: list[int]  # rising numbers of codes after which the client gets a picture, not yet reached
    gone: bool = False
    failed: bool = False
    shown: bool = False  # the client has got a first picture
    finished: bool = False  # the client has got the whole image
    codes: list[int] = field(default_factory=list)  # grows while the image is decoded
    submitted: float = field(default_factory=time.perf_counter)

    def request(self, name: str) -> Request:
        """Returns the request for the engine."""
        return Request(name, self.prompt, self.seed, self.sampling, self)

    def tell(self, codes: list[int]) -> None:
        """Stores the codes, and posts news for every mark that they have reached."""
        self.codes = codes
        while self.marks and len(codes) >= self.marks[0]:
            self.order.post(News(self, self.marks.pop(0)))

    def fail(self, error: Exception) -> None:
        self.failed = True
        self.order.post(News(self, len(self.codes), error))


class Order:
    """The images of one request, and the queue that carries their news to the event loop."""

    def __init__(self) -> None:
        """Makes an order without images. Must be called in the event loop."""
        self.jobs: list[Job] = []
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Queue[News]()

    def post(self, news: News) -> None:
        """Hands news to the event loop, from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._news.put_nowait, news)

    async def next(self) -> News:
        """Returns the next news, in the order in which they were posted."""
        return await self._news.get()
