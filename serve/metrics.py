"""The figures of /metrics, in the form that Prometheus reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from adt_tree.records import Step

SECONDS = [0.1 * 2**n for n in range(13)]  # upper ends of the histograms' classes: 0.1 s to 7 minutes
OUTCOMES = ("completed", "failed", "cancelled")


class Metrics:
    """Counters of one service, in a new registry. Each has the label `replica`."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, replica: str) -> None:
        self._registry, self._replica = CollectorRegistry(), replica
        self._codes = self._add(Counter, "adt_codes", "codes that were committed")
        self._calls = self._add(Counter, "adt_target_calls", "target calls, one for each image of a pass")
        self._seconds = self._add(Counter, "adt_decoding_seconds", "seconds of all steps")
        self.refused = self._add(Counter, "adt_refused", "requests that the full queue refused")
        meaning = "from a request to the first picture of its stream"
        self.first_partial = self._add(Histogram, "adt_first_partial_seconds", meaning)
        self.image_seconds = 1.0  # moving average, from a request to a finished image
        self._image = self._add(Histogram, "adt_image_seconds", "from a request to a finished image")
        images = Counter("adt_images", "images by outcome", ("replica", "outcome"), registry=self._registry)
        self.images = {outcome: images.labels(replica, outcome) for outcome in OUTCOMES}

    def _add(self, kind: type, name: str, text: str) -> Any:
        buckets = {"buckets": SECONDS} if kind is Histogram else {}
        return kind(name, text, ("replica",), registry=self._registry, **buckets).labels(self._replica)

    def watch(self, waiting: Callable[[], int], flying: Callable[[], int]) -> None:
        """Shows the length of the queue and the number of images in flight."""
        self._add(Gauge, "adt_queue_images", "images that wait for a slot").set_function(waiting)
        self._add(Gauge, "adt_in_flight_images", "images in slots").set_function(flying)

    def count(self, steps: Sequence[Step]) -> None:
        """Counts one step of the engine. steps: its record for every image that took part."""
        self._codes.inc(sum(step.accepted + 1 for step in steps))
        self._calls.inc(len(steps))
        self._seconds.inc(steps[0].ms / 1e3 if steps else 0.0)

    def finish(self, started: float) -> None:
        """Counts a finished image whose request came at a time of time.perf_counter()."""
        seconds = time.perf_counter() - started
        self.images["completed"].inc()
        self._image.observe(seconds)
        self.image_seconds += (seconds - self.image_seconds) / 10

    def text(self) -> bytes:
        """Returns all figures."""
        return generate_latest(self._registry)
