"""The file of links: what people write, or `hetrl probe` measures, about what lies between sites."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from hetrl.describe.yaml_file import NotNegative, Strict
from hetrl.hardware import Link


class LinkEntry(Strict):
    """One wide-area link: one-way delay, bandwidth in one direction."""

    between: tuple[str, str]
    delay_ms: NotNegative
    gbps: NotNegative

    def link(self) -> Link:
        """Return the planner's link."""
        return Link(self.between, self.delay_ms, self.gbps)


def _each_once(links: tuple[LinkEntry, ...]) -> tuple[LinkEntry, ...]:
    for index, link in enumerate(links):
        for other in links[:index]:
            if set(link.between) == set(other.between):
                raise ValueError(
                    f"the link between {' and '.join(other.between)} is there twice, with {other.gbps:g} and "
                    f"{link.gbps:g} gbps; a link is the same both ways"
                )
    return links


Links = Annotated[tuple[LinkEntry, ...], AfterValidator(_each_once)]


class LinksFile(Strict):
    """`topology/links.yaml`."""

    links: Links
