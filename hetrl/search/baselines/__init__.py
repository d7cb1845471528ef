"""Baselines: the plans that other systems would make, one file each; docs/baselines.md says why they are fair.

Each sees only what its authors' system sees, and is then valued by the full cost model.
"""

from collections.abc import Callable, Mapping

from hetrl.plan import Plan
from hetrl.search.assemble import Made
from hetrl.search.baselines import areal_hex, streamrl, verl, verl_expert
from hetrl.search.space import Space

PLANS: Mapping[str, Callable[[Space, float, Made], tuple[Plan, int]]] = {
    "verl": verl.plan,
    "verl-expert": verl_expert.plan,
    "streamrl": streamrl.plan,
    "areal-hex": areal_hex.plan,
}
TUNING: Mapping[str, str] = {  # how the plan of each was tuned, for whoever prints it beside its value
    "verl": verl.TUNING,
    "verl-expert": verl_expert.TUNING,
    "streamrl": streamrl.TUNING,
    "areal-hex": areal_hex.TUNING,
}
