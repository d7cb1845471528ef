"""One RL post-training over several Slurm clusters: `hetrl.solve` and its like plan it, `docs/library.md` shows how."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a type checker does not follow what is loaded by name
    from hetrl.cost.efficiency import Efficiencies as Efficiencies
    from hetrl.cost.objective import Objective as Objective
    from hetrl.errors import HetrlError as HetrlError
    from hetrl.explanation import Explanation as Explanation
    from hetrl.hardware import Link as Link, Node as Node, Site as Site, Topology as Topology
    from hetrl.lengths import Lengths as Lengths
    from hetrl.library import explain as explain, predict as predict, simulate as simulate, solve as solve
    from hetrl.plan.document import read_plan as read_plan
    from hetrl.plan.plan import Plan as Plan, Predicted as Predicted
    from hetrl.problem import Problem as Problem, read_problem as read_problem
    from hetrl.simulator import Simulated as Simulated
    from hetrl.workload import Workload as Workload, architecture as architecture
else:
    _NAMES = {
        "cost.efficiency": ("Efficiencies",),
        "cost.objective": ("Objective",),
        "errors": ("HetrlError",),
        "explanation": ("Explanation",),
        "hardware": ("Link", "Node", "Site", "Topology"),
        "lengths": ("Lengths",),
        "library": ("explain", "predict", "simulate", "solve"),
        "plan.document": ("read_plan",),
        "plan.plan": ("Plan", "Predicted"),
        "problem": ("Problem", "read_problem"),
        "simulator": ("Simulated",),
        "workload": ("Workload", "architecture"),
    }
    __all__ = sorted(name for names in _NAMES.values() for name in names)

    def __getattr__(name: str) -> object:
        """Load a name of the library when it is first asked for: `import hetrl` loads nothing."""
        for module, names in _NAMES.items():
            if name in names:
                return getattr(import_module(f"hetrl.{module}"), name)
        raise AttributeError(f"module 'hetrl' has no attribute '{name}'")
