"""Baselines, one file each: plans of other systems and of other searches; docs/baselines.md says why they are fair.

A system's plan is made of what that system sees, and is then valued by the full cost model. The searches `deap` and
`random` see what sha-ea sees.
"""

from collections.abc import Callable, Mapping

from hetrl.plan.plan import Plan
from hetrl.search.assemble import Made
from hetrl.search.baselines import areal_hex, deap_ea, random_plans, streamrl, verl, verl_expert
from hetrl.search.space import Space

_FILES = {
    "verl": verl,
    "verl-expert": verl_expert,
    "streamrl": streamrl,
    "areal-hex": areal_hex,
    "deap": deap_ea,
    "random": random_plans,
}
PLANS: Mapping[str, Callable[[Space, float, Made], tuple[Plan, int]]] = {n: file.plan for n, file in _FILES.items()}
SEARCHES = ("deap", "random")  # the baselines that are not another system's plan
TUNING: Mapping[str, str] = {n: file.TUNING for n, file in _FILES.items()}  # how the plan of each was tuned
