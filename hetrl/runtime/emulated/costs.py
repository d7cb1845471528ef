"""What emulated engines wait by: the cost model, as the launcher puts it into every site's directory.

A process of a site knows of the plan, but not of the machines of all sites, nor of the links between them.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from hetrl.cost.model import CostModel
from hetrl.errors import HetrlError
from hetrl.files import replace_text

COSTS = "costs.json"


def write_costs(directory: Path, model: CostModel) -> None:
    """Write the cost model into a site's directory."""
    replace_text(directory / COSTS, msgspec.json.encode(model).decode() + "\n")


def read_costs(directory: Path) -> CostModel:
    """Read the cost model of a site's directory; raises HetrlError where it is not there, or is none."""
    path = directory / COSTS
    try:
        return msgspec.json.decode(path.read_bytes(), type=CostModel)
    except OSError as error:
        raise HetrlError(f"{path}: {error.strerror}; the launcher writes it for launch.engines emulated") from None
    except msgspec.MsgspecError as error:
        raise HetrlError(f"{path}: not a cost model ({error})") from None
