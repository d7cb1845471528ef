from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.run.link_metrics import LinkMeter, since
from hetrl.runtime.transport.member import Envelope, RunAborted

_HEADER = wire.Header(run="r", source="alpha/gateway/0", to=("alpha/controller/0",), id=1)


class _Gateways:
    """Answers in place of a member's gateways: what `links` says, or an error."""

    def __init__(self) -> None:
        self.links: dict[str, dict[str, wire.LinkCounters] | HetrlError] = {}
        self.asked: list[str] = []
        self.offences: dict[str, dict[str, int]] = {}

    async def request(self, to: str, message: wire.Message, **_: Any) -> Envelope:
        site = wire.site_of(to)
        assert (to, message) == (f"{site}/gateway/0", wire.LinkStats())
        self.asked.append(site)
        links = self.links[site]
        if isinstance(links, HetrlError):
            raise links
        offences = self.offences.get(site, {})
        return Envelope(_HEADER, wire.LinkStatsReply(links=links, refused=0, malformed=0, offences=offences), ())


def _counters(sent: int, reconnects: int = 0) -> wire.LinkCounters:
    return wire.LinkCounters(bytes_sent=sent, bytes_received=1, round_trip_seconds=0.05, reconnects=reconnects)


def _read(gateways: _Gateways, meter: LinkMeter, step: int) -> dict[str, Any]:
    return asyncio.run(meter.read(step))


def test_a_step_has_what_its_links_carried_since_the_step_before() -> None:
    gateways = _Gateways()
    meter = LinkMeter(gateways, ("alpha", "beta"))  # type: ignore[arg-type]
    for step, total in ((1, 100), (2, 250)):
        gateways.links["alpha"] = {"beta": _counters(total, reconnects=step)}
        row = _read(gateways, meter, step)
    assert row["bytes_per_link"] == {"alpha-beta": 251}
    link = row["links"]["alpha-beta"]
    assert (link["bytes_sent"], link["bytes_received"], link["reconnects"]) == (150, 0, 1)
    assert link["round_trip_seconds"] == 0.05


def test_gateways_of_other_sites_are_asked_in_every_tenth_step_and_each_link_is_told_once() -> None:
    gateways = _Gateways()
    gateways.links = {
        site: {peer: _counters(5) for peer in ("alpha", "beta", "gamma") if peer != site}
        for site in ("alpha", "beta", "gamma")
    }
    meter = LinkMeter(gateways, ("alpha", "beta", "gamma"))  # type: ignore[arg-type]
    assert set(_read(gateways, meter, 9)["links"]) == {"alpha-beta", "alpha-gamma"}
    assert gateways.asked == ["alpha"]
    assert set(_read(gateways, meter, 10)["links"]) == {"alpha-beta", "alpha-gamma", "beta-gamma"}
    assert gateways.asked == ["alpha", "alpha", "beta", "gamma"]


def test_what_was_refused_is_told_by_site_and_sender_in_words_that_no_terminal_obeys() -> None:
    gateways = _Gateways()
    gateways.links, gateways.offences = {"alpha": {}, "beta": {}}, {"beta": {"gamma": 3, "x\x1b[2J": 2**60}}
    meter = LinkMeter(gateways, ("alpha", "beta"))  # type: ignore[arg-type]
    _read(gateways, meter, 9)
    assert meter.offences == {}
    _read(gateways, meter, 10)
    assert meter.offences == {"beta": {"gamma": 3, "x\\x1b[2J": 2**60}}


def test_a_gateway_that_does_not_answer_fails_no_step() -> None:
    gateways = _Gateways()
    gateways.links["alpha"] = HetrlError("alpha/gateway/0 did not answer")
    meter = LinkMeter(gateways, ("alpha", "beta"))  # type: ignore[arg-type]
    assert _read(gateways, meter, 1) == {"links": {}, "bytes_per_link": {}}
    gateways.links["alpha"] = RunAborted("the run is over")
    with pytest.raises(RunAborted):
        _read(gateways, meter, 2)


def test_a_run_on_one_site_has_no_links() -> None:
    gateways = _Gateways()
    gateways.links["alpha"] = {}
    assert _read(gateways, LinkMeter(gateways, ("alpha",)), 10)["links"] == {}  # type: ignore[arg-type]


def test_a_gateway_that_started_again_counts_from_zero() -> None:
    grown = since(_counters(1000), _counters(30))
    assert (grown["bytes_sent"], grown["bytes_received"]) == (30, 1)


def test_a_peak_is_told_as_it_is() -> None:
    before, now = (wire.LinkCounters(bytes_sent=sent, peak_queued_bytes=peak) for sent, peak in ((10, 7), (30, 9)))
    grown = since(before, now)
    assert (grown["bytes_sent"], grown["peak_queued_bytes"]) == (20, 9)
