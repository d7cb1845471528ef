"""Baselines, one file each: plans of other systems and of other searches; docs/baselines.md says why they are fair.

A system's plan is made of what that system sees, and is then valued by the full cost model. The searches `deap` and
`random` see what sha-ea sees.
"""

from collections.abc import Callable, Mapping

from hetrl.plan.plan import Plan
from hetrl.search.assemble import Made
from hetrl.search.baselines import areal_hex, deap_ea, random_plans, streamrl, verl, verl_expert
from hetrl.search.space import Space

PLANS: Mapping[str, Callable[[Space, float, Made], tuple[Plan, int]]] = {
    "verl": verl.plan,
    "verl-expert": verl_expert.plan,
    "streamrl": streamrl.plan,
    "areal-hex": areal_hex.plan,
    "deap": deap_ea.plan,
    "random": random_plans.plan,
}
SEARCHES = ("deap", "random")  # the baselines that are not another system's plan
TUNING: Mapping[str, str] = {  # how the plan of each was tuned, for whoever prints it beside its value
    "verl": verl.TUNING,
    "verl-expert": verl_expert.TUNING,
    "streamrl": streamrl.TUNING,
    "areal-hex": areal_hex.TUNING,
    "deap": deap_ea.TUNING,
    "random": random_plans.TUNING,
}
