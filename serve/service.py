"""The objects that the routes of the application share: the model, the queue, the painter and the figures."""

from __future__ import annotations

from adt_tree.pipeline import Pipeline
from serve.job import Order
from serve.metrics import Metrics
from serve.pixels import Painter
from serve.scheduler import Scheduler
from serve.settings import Settings


class Service:
    """A running service. close() ends its threads."""

    def __init__(self, pipe: Pipeline, settings: Settings) -> None:
        self.pipe, self.settings = pipe, settings
        self.metrics = Metrics(settings.replica)
        self.painter = Painter(pipe)
        self.scheduler = Scheduler(pipe, settings, self.metrics)
        self.scheduler.start()

    def leave(self, order: Order) -> None:
        """Drops the unfinished images of a request, and counts them as failed or cancelled."""
        self.scheduler.leave([job for job in order.jobs if not job.finished])
        for job in order.jobs:
            if not job.finished:
                self.metrics.images["failed" if job.failed else "cancelled"].inc()

    def close(self) -> None:
        """Drops all unfinished images, and ends the threads."""
        self.scheduler.close()
        self.painter.close()
