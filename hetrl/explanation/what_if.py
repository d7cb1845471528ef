"""What other hardware would change, and the best plan of another kind: each question is a search of its own.

    unchanged            the same search on the same topology: how good a search of this length is
    no training crosses  where one of the plan does: the best plan of sha-ea whose trainings each stay in one site
    contexts kept        in mode async, where a weight version has them computed anew (`algorithm.on_update`)
    each link doubled    its bandwidth, both directions
    one more node        of each type, at each site that has it
    each site dropped    with its links

Where the plan at hand still holds for a changed problem, it competes with what the search finds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from hetrl.cost.check import violations
from hetrl.cost.iteration import with_prediction
from hetrl.cost.objective import SECONDS, Measure, measure_of, plan_value
from hetrl.errors import InfeasibleError
from hetrl.explanation.resources import critical_path
from hetrl.hardware import Site, Topology
from hetrl.plan.plan import Plan, site_of
from hetrl.problem import Problem
from hetrl.search import solve, solvers_for
from hetrl.search.baselines import SEARCHES
from hetrl.search.robust import crosses
from hetrl.search.space import Grouping

UNCHANGED = "as it is, planned again"


@dataclass(frozen=True)
class Question:
    """A changed problem, `dropped` the site that it lacks; or, with `home`, each training in one site."""

    name: str
    problem: Problem
    dropped: str = ""
    home: bool = False


@dataclass(frozen=True)
class WhatIf:
    """The answer: the iteration of the best plan for the changed problem; None where no plan was found.

    `value` is what the objective makes least. `same_plan` says that it is the plan at hand, which no other one beats.
    """

    name: str
    seconds: float | None
    same_plan: bool = False
    value: float | None = None


@dataclass(frozen=True)
class Term:
    """What a task adds to the iteration of the plan, and to that of the runner-up."""

    name: str
    seconds: float
    other_seconds: float


@dataclass(frozen=True)
class RunnerUp:
    """The best plan met that groups the tasks otherwise or uses other sites; the terms sum to both iterations."""

    found_by: str
    seconds: float
    groups: tuple[tuple[str, ...], ...]
    sites: tuple[str, ...]
    terms: tuple[Term, ...]


def questions(plan: Plan, problem: Problem) -> Iterator[Question]:
    """Yield what is asked for a plan of a problem."""
    topology, workload = problem.topology, problem.workload
    yield Question(UNCHANGED, problem)
    if crosses(plan):
        yield Question("no training crosses a link", problem, home=True)
    if workload.staleness and workload.renews_contexts:
        kept = replace(problem, workload=replace(workload, renews_contexts=False))
        yield Question("contexts kept: on_update: continue", kept)
    for link in topology.links:
        links = tuple(replace(one, gbps=2 * one.gbps) if one is link else one for one in topology.links)
        faster = replace(problem, topology=replace(topology, links=links))
        yield Question(f"link {link.between[0]}–{link.between[1]} doubled", faster)
    for site in topology.sites:
        for name, more in _one_more_node(topology, site):
            yield Question(name, replace(problem, topology=more))
    for site in topology.sites if len(topology.sites) > 1 else ():
        sites = tuple(other for other in topology.sites if other is not site)
        links = tuple(link for link in topology.links if site.name not in link.between)
        yield Question(f"without {site.name}", replace(problem, topology=Topology(sites, links)), site.name)


def _one_more_node(topology: Topology, site: Site) -> Iterator[tuple[str, Topology]]:
    taken = {node.name for node in site.nodes}
    for node in {topology.node_class[f"{site.name}/{node.name}"]: node for node in site.nodes}.values():
        name = next(f"more-{number}" for number in range(len(taken) + 1) if f"more-{number}" not in taken)
        larger = replace(site, nodes=(*site.nodes, replace(node, name=name)))
        sites = tuple(larger if other is site else other for other in topology.sites)
        yield f"one more node at {site.name}: {node.gpus} × {node.gpu}", replace(topology, sites=sites)


@dataclass(frozen=True)
class Study:
    """The answers in the order of the questions, and the runner-up; None where no other kind of plan was found.

    `value` is that of the plan at hand, None where it breaks a bound of the objective; `measure` says of what.
    """

    what_ifs: tuple[WhatIf, ...]
    runner_up: RunnerUp | None
    value: float | None
    measure: Measure = SECONDS

    @property
    def of_seconds(self) -> bool:
        """Return whether the objective makes the seconds of an iteration least."""
        return self.measure == SECONDS


def study(
    plan: Plan, problem: Problem, budget_seconds: float, seed: int = 0, report: Callable[[str], None] = lambda _: None
) -> Study:
    """Answer every question by a search of `budget_seconds`; `report` is told what is asked.

    The runner-up is the best of what the searches without a site, sha-ea without the plan's grouping and the other
    solvers find; the searches among the baselines find nothing of another kind.
    """
    solvers = solvers_for(problem.objective)
    made_by = plan.solver.name if plan.solver.name in solvers else "sha-ea"
    others: list[Plan | None] = []
    answers = []
    for question in questions(plan, problem):
        report(question.name)
        solver = "sha-ea" if question.home else made_by
        found = _solved(question.problem, solver, budget_seconds, seed, home=question.home)
        answers.append(_answer(question, plan, found))
        if question.dropped or question.home or question.name == UNCHANGED:
            others.append(found)
    for solver in (name for name in solvers if name not in (made_by, *SEARCHES)):
        report(f"solver {solver}")
        others.append(_solved(problem, solver, budget_seconds, seed))
    report("another grouping")
    grouping = tuple(group.tasks for group in plan.groups)
    others.append(_solved(problem, "sha-ea", budget_seconds, seed, grouping))
    value = plan_value(plan, problem.topology, problem.objective)
    own = value if value < math.inf else None
    return Study(tuple(answers), runner_up(plan, others, problem), own, measure_of(problem.objective))


def _solved(
    problem: Problem,
    solver: str,
    budget_seconds: float,
    seed: int,
    excluded: Grouping | None = None,
    home: bool = False,
) -> Plan | None:
    try:
        robust = 0.0 if home else problem.planner.robust
        return solve(problem, solver, budget_seconds, seed, excluded=excluded, home=home, robust=robust)
    except InfeasibleError:
        return None


def _answer(question: Question, plan: Plan, found: Plan | None) -> WhatIf:
    changed = question.problem
    value = math.inf if found is None else plan_value(found, changed.topology, changed.objective)
    if question.name != UNCHANGED and not question.home and not violations(plan, changed.model):
        same = with_prediction(plan, changed.model)
        own = plan_value(same, changed.topology, changed.objective)
        if own <= value and own < math.inf:
            return WhatIf(question.name, same.predicted.iteration_seconds, True, own)
    if found is None:
        return WhatIf(question.name, None)
    return WhatIf(question.name, found.predicted.iteration_seconds, value=value)


def kind_of(plan: Plan) -> tuple[frozenset[frozenset[str]], frozenset[str]]:
    """Return how a plan groups its tasks, and the sites that it uses."""
    return frozenset(frozenset(group.tasks) for group in plan.groups), frozenset(map(site_of, plan.devices))


def runner_up(plan: Plan, others: Sequence[Plan | None], problem: Problem) -> RunnerUp | None:
    """Return the best of the plans, where a search found one, that is of another kind than this one."""
    found = [other for other in others if other is not None and kind_of(other) != kind_of(plan)]
    if not found:
        return None
    best = min(found, key=lambda other: plan_value(other, problem.topology, problem.objective))
    paths = (critical_path(one, problem.model) for one in (plan, best))
    ours, theirs = ({part.name: part.seconds for part in path} for path in paths)
    names = dict.fromkeys((*ours, *theirs))
    terms = tuple(Term(name, ours.get(name, 0.0), theirs.get(name, 0.0)) for name in names)
    groups = tuple(group.tasks for group in best.groups)
    return RunnerUp(best.solver.name, best.predicted.iteration_seconds, groups, best.site_order, terms)
