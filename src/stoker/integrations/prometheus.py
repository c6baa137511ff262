"""Prometheus gauges while a script runs: ``stoker run --metrics-port``.

The numbers are those of ``numbers``, for each rank and loader, over the last seconds before a scrape. They are computed
only when scraped.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ..core.errors import UsageError
from ..core.types import JsonObject
from ..diagnosis.report.merge import Snapshot, snapshots
from .numbers import CODES, MEANINGS, Totals, numbers, totals, verdict

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

MISSING = "--metrics-port needs prometheus-client: pip install 'stoker[metrics]'"
SPAN_S = 10.0  # least seconds that gauges cover; shorter spans are noisy, and differ between alternating scrapers
KEPT = 64  # scrapes that are remembered; enough for the span at up to six scrapes per second

SeriesKey = tuple[str, str]  # rank and loader


def check() -> None:
    """Raises UsageError if prometheus-client is not installed."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise UsageError(MISSING) from None


@contextlib.contextmanager
def serving(where: tuple[str, int] | None, sent: Callable[[], Sequence[JsonObject]]) -> Iterator[None]:
    """Serves ``/metrics`` while the block runs. If it cannot, it says so on stderr and the block runs all the same.

    Args:
        where: host and port; port 0 picks a free one. None: does not serve.
        sent: returns the last snapshots of the watched processes.
    """
    if where is None:
        yield
        return
    from prometheus_client import CollectorRegistry, start_http_server

    registry, gauges = CollectorRegistry(auto_describe=False), Gauges(sent)
    registry.register(gauges)
    try:
        server, _ = start_http_server(where[1], where[0], registry)
    except OSError as e:
        sys.stderr.write(f"stoker: cannot serve metrics at {where[0]}:{where[1]}: {e.strerror or e}\n")
        yield
        return
    host = f"[{where[0]}]" if ":" in where[0] else where[0]
    sys.stderr.write(f"stoker: metrics at http://{host}:{server.server_port}/metrics\n")
    sys.stderr.flush()

    def close() -> None:
        server.shutdown()
        server.server_close()

    try:
        yield
    finally:
        gauges.stop()
        # Do not wait for this: it takes up to half a second, which would delay the end of the run.
        threading.Thread(target=close, daemon=True).start()


class Gauges:
    """The collector that Prometheus scrapes."""

    def __init__(self, sent: Callable[[], Sequence[JsonObject]]) -> None:
        self._sent = sent
        self._seen: deque[tuple[float, dict[SeriesKey, Totals]]] = deque(maxlen=KEPT)
        self._lock = threading.Lock()  # the server handles each request in its own thread

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yields the gauges. A loader without batches in the span has no gauges for times and shares."""
        from prometheus_client.core import GaugeMetricFamily

        with self._lock:
            processes = snapshots(self._sent())
            now, before = self._now(processes)
        families = {key: GaugeMetricFamily(f"stoker_data_{key}", text, None, ["rank", "loader"])
                    for key, text in MEANINGS.items() if key != "verdict"}  # fmt: skip
        for key, total in now.items():
            for name, value in numbers(total.since(before.get(key)), total.failed)._asdict().items():
                if not math.isnan(value):
                    families[name].add_metric(key, value)
        yield from families.values()
        family = GaugeMetricFamily("stoker_data_verdict", MEANINGS["verdict"])
        family.add_metric([], CODES[verdict(processes)])
        yield family

    def stop(self) -> None:
        """Serves no data from now on. Waits for a scrape that is reading snapshots."""
        with self._lock:
            self._sent = list

    def _now(self, processes: Sequence[Snapshot]) -> tuple[dict[SeriesKey, Totals], dict[SeriesKey, Totals]]:
        """Returns the totals now and those to compare with: the newest at least ``SPAN_S`` old, else the oldest."""
        now: dict[SeriesKey, Totals] = {}
        for process in processes:
            for name, total in totals(process.loaders).items():
                key = str(process.rank), name
                now[key] = now[key].plus(total) if key in now else total
        at = time.monotonic()
        oldest = self._seen[0][1] if self._seen else {}
        before = next((there for then, there in reversed(self._seen) if at - then >= SPAN_S), oldest)
        self._seen.append((at, now))
        return now, before
