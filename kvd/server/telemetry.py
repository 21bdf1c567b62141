"""All that tells others how the daemon is: the exporter, spans, the endpoint for Prometheus.

The law of this module: what can be refused is refused when it is made, addresses are bound then;
nothing runs before `start`; `close` takes 4 s at most, and less when all is well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kvd.server.collector import open_export, open_spans, plan_export
from kvd.server.config import Config
from kvd.server.exporter import Exporter
from kvd.server.figures import Figures
from kvd.server.loop import Loop
from kvd.server.respond import Responder
from kvd.server.scrape import Scrapes
from kvd.server.spans import Spans

__all__ = ["Telemetry"]

log = logging.getLogger(__name__)


class Telemetry:
    """For the loop's thread. ConfigError for what can't be."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._plan = plan_export(config)
        self._scrapes = Scrapes(config.prometheus) if config.prometheus is not None else None
        self._exporter: Exporter | None = None
        self._spans: Spans | None = None
        self._figures: Callable[[], Figures] | None = None

    def start(self, loop: Loop, figures: Callable[[], Figures], responder: Responder) -> None:
        """`figures`: a copy of what an administrator is shown now."""
        self._figures = figures
        if (scrapes := self._scrapes) is not None:
            loop.watch(scrapes.asked, lambda events: scrapes.hear(figures))
            scrapes.start()
        self._spans = open_spans(self._config, self._plan)
        if self._spans is not None:
            responder.ended = self._spans.add
        self._exporter = open_export(self._config, self._plan)
        if self._exporter is not None:
            self._export()
            loop.every(self._config.telemetry_interval_s, self._export)

    def _export(self, now: float = 0.0) -> None:
        assert self._exporter is not None and self._figures is not None
        if self._exporter.idle:
            self._exporter.take(self._figures())
        else:
            self._exporter.skip()

    def counted(self) -> dict[str, dict[str, int]]:
        """What it counts itself, of what there is."""
        parts = {"exports": self._exporter, "spans": self._spans, "scrapes": self._scrapes}
        return {name: part.counted() for name, part in parts.items() if part is not None}

    def stat(self) -> dict[str, Any]:
        """How it is, for an administrator."""
        shown = {"state": "off"} if self._exporter is None else self._exporter.stat()
        if self._scrapes is not None:
            shown["prometheus"] = self._scrapes.address
        return shown

    def close(self, *, last: bool = False) -> None:
        """Once; then it is nothing. `last`: the last figures are exported, if that is quick."""
        figures = None
        if last and self._exporter is not None and self._figures is not None:
            try:
                figures = self._figures()
            except Exception:  # what is shown must not leave sockets behind
                log.exception("the last figures are not exported")
        exporter, self._exporter = self._exporter, None
        spans, self._spans = self._spans, None
        scrapes, self._scrapes = self._scrapes, None
        if exporter is not None:
            exporter.close(figures)
        if spans is not None:
            spans.close()
        if scrapes is not None:
            scrapes.close()
