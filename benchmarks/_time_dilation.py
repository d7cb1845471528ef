"""Links in dilated time: so many times slower, delays as many times longer, and what is timed divided by as many.

To all that crosses, processors are then so many times faster: what this machine lacks to sites whose ranks and gateways
have cores of their own (Gupta et al., "To infinity and beyond: time-warped network emulation", NSDI 2006). TCP's own
timers keep their time, and so does memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from lab.worlds.gateways import Shape

EXPLAINED = (
    "Dilated: links so many times slower, delays as many times longer, and times divided by as many, as where ranks "
    "and gateways have processors of so many times the speed; this machine's cores are busy at 1 Gbps."
)


@dataclass(frozen=True)
class Dilated:
    """Links of a shape, where everything takes `times` as long; a share of the delays where what crosses is less."""

    shape: Shape
    times: int = 1
    delay_share: float = 1.0

    @property
    def link(self) -> Shape:
        """Return the shape that the lab's links get."""
        delay_ms = self.shape.delay_ms * self.times * self.delay_share
        return Shape(self.shape.gbps / self.times, delay_ms, self.shape.loss)

    def __str__(self) -> str:
        """Return the shape without its losses, as in a table."""
        asides = [f"dilated {self.times} times"] if self.times > 1 else []
        asides += ["delays to scale"] if self.delay_share < 1 else []
        aside = f" ({', '.join(asides)})" if asides else ""
        return f"{self.shape.gbps:g} Gbps, {self.shape.delay_ms:g} ms{aside}"
