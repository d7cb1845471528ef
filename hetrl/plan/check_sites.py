"""The constraints on a plan that concern several sites: their order, the routes of weights, the links between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import combinations

from hetrl.hardware import Topology
from hetrl.plan.plan import Plan, Route, site_of, sites_of
from hetrl.workload import ACTOR_TRAINING, TRAINED, TRAININGS

MOST_STREAMS = 256  # connections from gateway to gateway: each takes a file descriptor at either, and buffers


def repeated(names: Iterable[str]) -> list[str]:
    """Return the names that are there more than once."""
    return [name for name, count in Counter(names).items() if count > 1]


def site_violations(plan: Plan, topology: Topology) -> Iterator[str]:
    """Yield one line per broken constraint between sites of a plan whose shape is sound."""
    yield from _site_order(plan)
    yield from _weight_sync(plan, topology)
    yield from _links(plan, topology)


def _lead_site(plan: Plan) -> str:
    return site_of(plan.tasks[ACTOR_TRAINING].devices[0])


def _site_order(plan: Plan) -> Iterator[str]:
    """The used sites, each once, the actor trainer's first."""
    for site in repeated(plan.site_order):
        yield f"site_order: names the site {site} twice"
    used = sites_of(plan.devices)
    yield from (
        f"site_order: lacks the site {site}, which the plan uses" for site in used if site not in plan.site_order
    )
    for site in dict.fromkeys(plan.site_order):
        if site not in used:
            yield f"site_order: names the site {site}, which the plan does not use"
    lead = _lead_site(plan)
    if plan.site_order and plan.site_order[0] != lead:
        yield f"site_order: starts with {plan.site_order[0]}; the first rank of {ACTOR_TRAINING} is at {lead}"


def _weight_sync(plan: Plan, topology: Topology) -> Iterator[str]:
    """Routes for each model that is trained, and for no other."""
    if plan.weight_sync.encoding not in ("full", "delta"):
        yield f'weight_sync: encoding is full or delta, not "{plan.weight_sync.encoding}"'
    for route in plan.weight_sync.routes:
        if not {*TRAINED.get(route.model, (route.model,))} <= plan.tasks.keys():
            yield f"weight_sync, {_named(route)}: the plan trains no {route.model}"
    for model, tasks in TRAINED.items():
        if {*tasks} <= plan.tasks.keys():
            yield from _routes(model, plan, topology)


def _named(route: Route) -> str:
    return f"route {route.source} -> {route.target}" + (f" of the {route.model}" if route.model != "actor" else "")


def _routes(model: str, plan: Plan, topology: Topology) -> Iterator[str]:
    """Each site with stages of the training's first replica sends them over a link to each site that takes weights."""
    trains, takes = TRAINED[model]
    sources = sites_of(plan.tasks[trains].replicas[0].devices)
    targets = sites_of(plan.tasks[takes].devices)
    routes = [route for route in plan.weight_sync.routes if route.model == model]
    there = Counter((route.source, route.target) for route in routes)
    for route in routes:
        where = f"weight_sync, {_named(route)}"
        if not 1 <= route.streams <= MOST_STREAMS:
            yield f"{where}: has {route.streams} streams; it takes 1 to {MOST_STREAMS}"
        if not topology.linked(route.source, route.target):
            yield f"{where}: the topology has no link between {route.source} and {route.target}"
        elif route.source not in sources or route.target not in targets:
            yield f"{where}: {trains} sends from {', '.join(sources)}, {takes} takes weights at {', '.join(targets)}"
    for route in dict.fromkeys(replace(route, streams=1) for route in routes):
        if (count := there[route.source, route.target]) > 1:
            yield f"weight_sync, {_named(route)}: is there {count} times"
    for source in sources:
        for target in targets:
            if source != target and (source, target) not in there:
                yield f"weight_sync: no route from {source}, where {trains} is, to {target}, where {takes} is"


def _links(plan: Plan, topology: Topology) -> Iterator[str]:
    """Samples pass the lead site's controller; the sites of a training task form one torch world."""
    lead = _lead_site(plan)
    for site in sites_of(plan.devices):
        if not topology.linked(lead, site):
            yield f"site {site}: has no link to {lead}, where the controller runs"
    for name in TRAININGS:
        sites = sites_of(plan.tasks[name].devices) if name in plan.tasks else []
        for site, other in combinations(sites, 2):
            if not topology.linked(site, other):
                yield f"{name}: trains over {site} and {other}, which have no link"
