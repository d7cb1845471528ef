"""The ranks of a world, and those that a site has of them."""

from __future__ import annotations

from hetrl.plan.plan import Replica, Stage, TaskPlan
from hetrl.runtime.wire.members import World


def test_a_rank_is_one_of_those_at_its_site() -> None:
    stages = (Stage(("a/n0/0", "a/n0/1"), (0, 4)), Stage(("b/n0/0", "b/n0/1"), (4, 8)))
    other = (Stage(("b/n1/0", "b/n1/1"), (0, 4)), Stage(("a/n1/0", "a/n1/1"), (4, 8)))
    world = World("actor_training", 0, 0, TaskPlan("megatron", (Replica(4, stages), Replica(4, other))))
    assert [device[0] for device in world.plan.rank_order()] == ["a", "a", "b", "b", "b", "b", "a", "a"]
    assert [world.beside(rank) for rank in range(8)] == [
        *((0, 4), (1, 4)),
        *((0, 4), (1, 4), (2, 4), (3, 4)),
        *((2, 4), (3, 4)),
    ]
