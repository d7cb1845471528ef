"""From site files and the gateways' addresses to the ways between the sites."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from hetrl.describe.sites import SiteFile
from hetrl.errors import HetrlError, UsageError
from hetrl.files import write_private
from hetrl.plan.plan import Route
from hetrl.runtime.gateway.ways import Offer, SiteLinks, Way
from launch.site_ways import OFFERS_PER_PEER, STREAMS, links_of, relay_secrets

RELAY, PROXY, LOGIN = "relay.example.org:7443", "proxy.example.org:3128", "ada@login.example.org"


def site(name: str, **keys: object) -> SiteFile:
    return SiteFile.model_validate({"name": name, **keys})


def links(*sites: SiteFile) -> dict[str, SiteLinks]:
    return links_of(sites, {one.name: f"tcp://{one.name}.example.org:5000" for one in sites})


def way(**keys: object) -> Way:
    return Way(**{"endpoint": "tcp://b.example.org:5000", "streams": STREAMS, **keys})


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({}, {}, way(way="direct")),
        ({}, {"ingress": "ssh", "login": LOGIN}, way(way="ssh", login=LOGIN)),
        ({}, {"login": LOGIN}, way(way="direct")),  # a login alone does not keep anybody out
        ({}, {"relay": RELAY}, way(way="relay", relay=RELAY)),
        ({}, {"relay": RELAY, "ingress": "direct"}, way(way="direct")),
        ({"egress": "ssh"}, {"login": LOGIN}, way(way="ssh", login=LOGIN)),
        ({"egress": "relay", "relay": RELAY}, {}, way(way="relay", relay=RELAY)),
        ({"egress": "relay", "relay": RELAY}, {"relay": RELAY}, way(way="relay", relay=RELAY)),
        ({"egress": "proxy", "proxy": PROXY}, {}, way(way="proxy", proxy=PROXY)),
        ({"egress": "proxy", "proxy": PROXY}, {"relay": RELAY}, way(way="relay", relay=RELAY, proxy=PROXY)),
        ({"ways": {"b": "relay"}, "relay": RELAY}, {}, way(way="relay", relay=RELAY)),
        ({"ways": {"b": "direct"}, "egress": "ssh"}, {}, way(way="direct")),
        ({"ways": {"b": "proxy"}, "proxy": PROXY}, {"relay": RELAY}, way(way="proxy", proxy=PROXY)),
        ({"ways": {"elsewhere": "ssh"}}, {}, way(way="direct")),
    ],
)
def test_the_way_from_one_site_to_another(one: dict[str, object], other: dict[str, object], expected: Way) -> None:
    assert links(site("a", **one), site("b", **other))["a"].links == {"b": expected}


def test_two_keys_in_one_file_bring_a_site_behind_a_relay() -> None:
    found = links(site("a"), site("b", egress="relay", relay=RELAY), site("c"))
    assert {(one, other): one_way.way for one in found for other, one_way in found[one].links.items()} == {
        ("a", "b"): "relay",
        ("a", "c"): "direct",
        ("b", "a"): "relay",
        ("b", "c"): "relay",
        ("c", "a"): "direct",
        ("c", "b"): "relay",
    }
    assert found["a"].offers == (Offer(RELAY, OFFERS_PER_PEER),)
    assert found["b"].offers == (Offer(RELAY, 2 * OFFERS_PER_PEER),)
    assert found["c"].relays == (RELAY,)


def test_a_site_behind_a_proxy_waits_at_the_relay_through_it() -> None:
    found = links(site("a"), site("b", egress="proxy", proxy=PROXY, relay=RELAY, proxy_credentials="/etc/password"))
    assert found["b"].offers == (Offer(RELAY, OFFERS_PER_PEER, PROXY),)
    assert found["b"].proxy_credentials == "/etc/password"
    assert found["a"].links["b"].proxy is None


def test_streams_are_those_of_the_plan_where_it_asks_for_more() -> None:
    gateways = {"a": "tcp://a:1", "b": "tcp://b:1"}
    found = links_of([site("a"), site("b")], gateways, [Route("a", "b", 12), Route("b", "a", 1)])
    assert (found["a"].links["b"].streams, found["b"].links["a"].streams) == (12, STREAMS)


@pytest.mark.parametrize(
    ("one", "other", "why"),
    [
        ({}, {"ingress": "closed"}, "b lets nobody in (ingress: closed)"),
        ({"egress": "ssh"}, {}, "a takes ssh, and the file of b has no login"),
        ({"ways": {"b": "relay"}}, {}, "their way is a relay, and neither file names one"),
        ({"egress": "relay", "relay": RELAY}, {"relay": "other:1"}, f"a has relay {RELAY}, b has other:1"),
    ],
)
def test_no_way_names_both_sites_and_three_remedies(one: dict[str, object], other: dict[str, object], why: str) -> None:
    with pytest.raises(UsageError) as caught:
        links(site("a", **one), site("b", **other))
    first, *remedies = str(caught.value).splitlines()
    assert first.startswith(f"there is no way from a to b: {why}; ")
    assert [next(word for word in ("relay:", "login:", "ingress:") if word in line) for line in remedies] == [
        "relay:",
        "login:",
        "ingress:",
    ]


def test_a_proxy_that_is_not_named_is_asked_for() -> None:
    with pytest.raises(UsageError, match="a: the way to b is proxy; set `proxy: host:port`"):
        links(site("a", ways={"b": "proxy"}), site("b"))


RELAYS = st.sampled_from([RELAY, "other:1"])
ALWAYS = {"login": st.just(LOGIN), "proxy": st.just(PROXY)}
FILES = st.one_of(
    st.fixed_dictionaries(
        {"egress": st.sampled_from(["direct", "ssh", "proxy"]), **ALWAYS}, optional={"relay": RELAYS}
    ),
    st.fixed_dictionaries({"egress": st.just("relay"), "relay": RELAYS, **ALWAYS}),
)


@given(st.lists(FILES, min_size=2, max_size=4))
def test_whoever_is_dialled_over_a_relay_waits_there_and_nobody_else_does(files: list[dict[str, object]]) -> None:
    sites = [site(name, **keys) for name, keys in zip("abcd", files, strict=False)]
    try:
        found = links(*sites)
    except UsageError:
        return
    dialled = {(other, w.relay) for one in found.values() for other, w in one.links.items() if w.way == "relay"}
    assert dialled == {(name, offer.relay) for name, one in found.items() for offer in one.offers}
    assert {(a, b) for a in found for b in found[a].links} == set(itertools.permutations(found, 2))


def test_secrets_come_from_files_that_nobody_else_reads(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_private(tmp_path / name, f"{name}\n", "secret")
    one = site("a", relay=RELAY, relay_secret=str(tmp_path / "one"))
    assert relay_secrets([one, site("b")]) == {RELAY: "one"}
    with pytest.raises(UsageError, match="b: .* is not the secret that another site has for relay"):
        relay_secrets([one, site("b", relay=RELAY, relay_secret=str(tmp_path / "two"))])
    with pytest.raises(HetrlError, match=f"cannot read the secret of relay {RELAY} .No such file"):
        relay_secrets([site("b", relay=RELAY, relay_secret=str(tmp_path / "none"))])
    (tmp_path / "one").chmod(0o644)
    with pytest.raises(HetrlError, match="others can read this secret of relay"):
        relay_secrets([one])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"egress": "relay"}, "egress: relay needs `relay`"),
        ({"egress": "proxy"}, "egress: proxy needs `proxy`"),
        ({"ingress": "ssh"}, "ingress: ssh needs `login`"),
        ({"relay": "relay.example.org"}, "is not an address; write host:port"),
        ({"proxy": "proxy.example.org:70000"}, "is not an address; write host:port"),
        ({"login": "-oProxyCommand=sh"}, "login"),
        ({"ways": {"b": "tunnel"}}, "ways.b"),
    ],
)
def test_a_site_file_that_cannot_be(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        site("a", **keys)
