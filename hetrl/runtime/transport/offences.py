"""What others sent that nobody of this run sends: garbage, words in another's name, answers that nobody asked for.

Each is dropped and counted under the name of whoever sent it. Encryption and checksums let no accident through, so that
after `MOST_OFFENCES` of one peer nothing of it is heard any more: it is broken, or broken into.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from hetrl.text import printable

MOST_OFFENCES = 8

_log = logging.getLogger(__name__)


class Offences:
    """The offences that `here` met, by peer; `cut_off` is told of a peer that has too many, and why."""

    def __init__(self, here: str, cut_off: Callable[[str, str], None]) -> None:
        self.counts: Counter[str] = Counter()
        self._here, self._cut_off = here, cut_off
        self._causes: dict[str, str] = {}

    def add(self, peer: str, what: object, *, forgiven: bool = False) -> None:
        """Count an offence; of one that is forgiven, only the first ones are logged and the peer is heard as before."""
        self.counts[peer] += 1
        if (number := self.counts[peer]) > MOST_OFFENCES:
            return
        said = printable(str(what))
        _log.warning("%s: refused, from %s: %s", self._here, printable(peer), said)
        if number == MOST_OFFENCES and not forgiven:
            self._causes[peer] = f"{self._here} cut {peer} off after {number} messages that nobody may send: {said}"
            _log.error("%s", printable(self._causes[peer]))
            self._cut_off(peer, self._causes[peer])

    def cause(self, peer: str) -> str | None:
        """Return why a peer is not heard any more; None where it is."""
        return self._causes.get(peer)

    @property
    def total(self) -> int:
        """Return the offences of all peers."""
        return self.counts.total()
