"""The thread that decodes, and the queue in front of it.

Images are taken oldest first. One engine decodes at a time; its slots are refilled between steps. Once the
oldest image in the queue needs another engine, the running one takes no new image, finishes those in flight
and hands over, so that no image waits for ever.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from adt_tree.batch import StepOutput
from adt_tree.engine_cache import EngineKey
from adt_tree.pipeline import Pipeline
from adt_tree.roles import Request
from serve.api_errors import ApiError
from serve.job import Job
from serve.metrics import Metrics
from serve.settings import Settings

MAX_WAIT_S = 60  # upper bound of Retry-After
log = logging.getLogger(__name__)


class Scheduler:
    """The queue, the images in flight, and the thread that decodes them."""

    def __init__(self, pipe: Pipeline, settings: Settings, metrics: Metrics) -> None:
        self.pipe, self.settings, self.metrics = pipe, settings, metrics
        self._changed = threading.Condition()  # guards the next three
        self._waiting: deque[Job] = deque()
        self._flying: dict[str, Job] = {}  # by the name of the image
        self._closing = False
        self._number = 0
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)
        metrics.watch(lambda: len(self._waiting), lambda: len(self._flying))

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread after the step that it is in; images that are not finished are dropped."""
        with self._changed:
            self._closing = True
            for job in (*self._waiting, *self._flying.values()):
                job.gone = True
            self._waiting.clear()
            self._changed.notify()
        self._thread.join()

    @property
    def alive(self) -> bool:
        """Tells whether the thread runs, so that images can be decoded."""
        return self._thread.is_alive()

    @property
    def backlog(self) -> int:
        """Returns the number of images in flight and in the queue."""
        return len(self._flying) + len(self._waiting)

    def check(self) -> None:
        """Raises ApiError 503 if the thread has ended, so that no image can be decoded any more."""
        if self._closing or not self.alive:
            raise ApiError(503, "the decoding thread has ended", code="server_error")

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queues images. Raises ApiError 429 if there is no room for all of them, and 503 as check()."""
        with self._changed:
            self.check()
            if self.backlog + len(jobs) > self.settings.slots + self.settings.queue:
                self.metrics.refused.inc()
                wait = math.ceil(min(max(self.metrics.image_seconds, 1), MAX_WAIT_S))
                text = f"{self.backlog} images are in flight or wait; try again in {wait} s"
                raise ApiError(429, text, code="rate_limit_exceeded", headers={"Retry-After": str(wait)})
            self._waiting.extend(jobs)
            self._changed.notify()

    def leave(self, jobs: Sequence[Job]) -> None:
        """Takes images out of the queue, and out of their slots at the next step."""
        with self._changed:
            for job in jobs:
                job.gone = True
            self._waiting = deque(job for job in self._waiting if not job.gone)
            self._changed.notify()

    def _run(self) -> None:
        """Decodes until the scheduler closes. A fault outside of decoding ends the thread: all images fail,
        and check() says so."""
        torch.set_num_threads(self._threads)  # the size of an OpenMP team is set for each calling thread
        try:
            while (key := self._next_engine()) is not None:
                self._decode(key)
        except Exception as error:
            log.exception("the decoding thread ends")
            with self._changed:
                self._closing = True
                jobs = [*self._flying.values(), *self._waiting]
                self._flying.clear()
                self._waiting.clear()
            for job in jobs:
                job.fail(error)

    def _decode(self, key: EngineKey) -> None:
        """Decodes the images of one engine until the next one needs another, or until decoding fails."""
        try:
            with self.pipe.engines.lease(key.method, key.slots, key.room, key.grid) as engine:
                for output in engine.steps(self._feed(key)):
                    self._deliver(output)
        except Exception as error:
            log.exception("decoding by %s failed", key.method.label)
            self._fail(error)
            self.pipe.engines.clear()

    def _next_engine(self) -> EngineKey | None:
        """Waits for an image, and returns the key of the engine that the oldest one needs. Returns None once
        the scheduler closes."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            return None if self._closing else self._waiting[0].engine

    def _feed(self, key: EngineKey) -> Iterator[Request | None]:
        """Yields the requests of one engine, oldest first.

        While images are in flight and no request for this engine is next, it yields None, so that the engine
        continues them. While none is in flight, it waits for a request. It ends once the next request needs
        another engine.
        """
        while True:
            with self._changed:
                self._flying = {n: job for n, job in self._flying.items() if not (job.gone or job.failed)}
                if not self._flying:
                    self._changed.wait_for(lambda: self._waiting or self._closing)
                if self._closing:
                    return
                fits = bool(self._waiting) and self._waiting[0].engine == key
                if not fits and not self._flying:
                    return
                request = None
                if fits:
                    job, name = self._waiting.popleft(), str(self._number)
                    self._number += 1
                    self._flying[name] = job
                    request = job.request(name)
            yield request

    def _deliver(self, output: StepOutput) -> None:
        """Tells the clients of a step's images how far they are.

        A client who leaves while the engine fills other slots is no longer in `_flying`, but the image is in
        this step, because the engine frees slots before it fills any.
        """
        for _, image in output.images:
            if job := self._flying.get(image.name):
                job.tell(image.codes)
        self.metrics.count([image.steps[-1] for _, image in output.images])
        with self._changed:
            for image in output.finished:
                self._flying.pop(image.name, None)

    def _fail(self, error: Exception) -> None:
        """Fails the images in flight, or the oldest in the queue if its engine could not be built."""
        with self._changed:
            jobs = list(self._flying.values())
            if not jobs and self._waiting:
                jobs = [self._waiting.popleft()]
            self._flying.clear()
        for job in jobs:
            job.fail(error)
