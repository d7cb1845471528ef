"""What the log says about a link: each change once, however often it is tried."""

from __future__ import annotations

import logging

_log = logging.getLogger(__name__)


class LinkReport:
    """Tells when a link comes and goes; `link` is how the log calls it."""

    def __init__(self, link: str) -> None:
        self.link = link
        self._last: str | None = None

    def up(self) -> None:
        """Say that the link stands, unless that was said last."""
        if self._last != "":
            _log.info("%s: connected", self.link)
            self._last = ""

    def down(self, why: str) -> None:
        """Say why the link does not stand, unless that was said last."""
        if self._last != why:
            _log.warning("%s: %s; trying on", self.link, why)
            self._last = why
