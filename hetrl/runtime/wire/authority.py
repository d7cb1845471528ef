"""Who may say what to whom: one table, by the roles of source and receiver; and what answers what.

Whatever the table does not allow is refused where it arrives, by the member or gateway that it is for. That the source
is a member of the run, and that the key of its site spoke, the gateway there has seen to before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from hetrl.runtime import wire
from hetrl.runtime.wire.header import Tagged
from hetrl.workload import (
    ACTOR_GENERATION,
    CRITIC_INFERENCE,
    CRITIC_TRAINING,
    INFERENCES,
    REFERENCE_INFERENCE,
    TASKS,
    TRAININGS,
)

Roles = frozenset[str]

_CONTROLLER, _GATEWAYS, _PROBES = frozenset({wire.CONTROLLER}), frozenset({wire.GATEWAY}), frozenset({wire.PROBE})
_KEEPERS = frozenset({wire.KEEPER})
_TASKS, _GENERATION, _CRITIC = frozenset(TASKS), frozenset({ACTOR_GENERATION}), frozenset({CRITIC_INFERENCE})
_INFERENCES, _REFERENCE = frozenset(INFERENCES), frozenset({REFERENCE_INFERENCE})
_TRAINERS, _CRITIC_TRAINER = frozenset(TRAININGS), frozenset({CRITIC_TRAINING})
_RANKS = frozenset(task + wire.RANK for task in TASKS)
_MEMBERS = _CONTROLLER | _TASKS | _RANKS | _PROBES | _KEEPERS


@dataclass(frozen=True)
class Say:
    """Members of these roles may say it to members of those; `home`: within one site only."""

    sources: Roles
    receivers: Roles
    home: bool = False


_ORDER, _ORDER_TO_TRAINER = (Say(_CONTROLLER, _TASKS),), (Say(_CONTROLLER, _TRAINERS),)
_WORD_OF_TRAINER = (Say(_TRAINERS, _CONTROLLER),)
_TO_GROUP, _FROM_GROUP = (Say(_TASKS | _RANKS, _CONTROLLER),), (Say(_CONTROLLER, _TASKS | _RANKS),)
_BETWEEN_MEMBERS, _BETWEEN_GATEWAYS = (Say(_MEMBERS, _MEMBERS),), (Say(_GATEWAYS, _GATEWAYS),)
_BETWEEN_RANKS, _BETWEEN_PROBES = (Say(_RANKS, _RANKS),), (Say(_PROBES, _PROBES),)
_BETWEEN_KEEPERS = (Say(_KEEPERS, _KEEPERS),)
_WEIGHTS = (
    Say(_TRAINERS - _CRITIC_TRAINER, _GENERATION | _REFERENCE),
    Say(_CRITIC_TRAINER, _CRITIC),
)
_WORD_ON_WEIGHTS = tuple(Say(say.receivers, say.sources) for say in _WEIGHTS)

AUTHORITY: Mapping[type[Tagged], tuple[Say, ...]] = {
    wire.Join: _TO_GROUP,
    wire.Go: _FROM_GROUP,
    wire.Heartbeat: (*_TO_GROUP, *_ORDER, *_BETWEEN_GATEWAYS),
    wire.Abort: _FROM_GROUP,
    wire.Finish: (*_ORDER, *_BETWEEN_PROBES),
    wire.Failed: _BETWEEN_MEMBERS,
    wire.Done: _BETWEEN_MEMBERS,
    wire.Undeliverable: (Say(_GATEWAYS, _MEMBERS),),
    wire.Hello: (Say(_MEMBERS, _GATEWAYS, home=True),),
    wire.Acknowledged: _BETWEEN_MEMBERS,
    wire.Probe: _BETWEEN_MEMBERS,
    wire.LinkOut: (Say(_GATEWAYS, _MEMBERS, home=True),),
    wire.LinkRestored: (Say(_GATEWAYS, _MEMBERS, home=True),),
    wire.GatewayEnded: (*_BETWEEN_GATEWAYS, Say(_GATEWAYS, _MEMBERS, home=True)),
    wire.LinkStats: (Say(_CONTROLLER, _GATEWAYS), Say(_MEMBERS, _GATEWAYS, home=True)),
    wire.LinkStatsReply: (Say(_GATEWAYS, _CONTROLLER), Say(_GATEWAYS, _MEMBERS, home=True)),
    wire.Echo: _BETWEEN_GATEWAYS,
    wire.EchoReply: _BETWEEN_GATEWAYS,
    wire.Measure: _BETWEEN_PROBES,
    wire.LinkMeasured: _BETWEEN_PROBES,
    wire.Ballast: _BETWEEN_PROBES,
    wire.Generate: (Say(_CONTROLLER, _GENERATION),),
    wire.Generated: (Say(_GENERATION, _CONTROLLER),),
    wire.Withdraw: (Say(_CONTROLLER, _GENERATION),),
    wire.Publish: _ORDER_TO_TRAINER,
    wire.Exported: _WORD_OF_TRAINER,
    wire.FinishPublish: _ORDER_TO_TRAINER,
    wire.CatchUp: _ORDER_TO_TRAINER,
    wire.Published: _WORD_OF_TRAINER,
    wire.WeightsBegin: _WEIGHTS,
    wire.WeightsTensor: _WEIGHTS,
    wire.WeightsEnd: _WEIGHTS,
    wire.WeightsApplied: _WORD_ON_WEIGHTS,
    wire.WeightsRejected: _WORD_ON_WEIGHTS,
    wire.Score: (Say(_CONTROLLER, _INFERENCES | _TRAINERS),),
    wire.Scored: (Say(_INFERENCES | _TRAINERS, _CONTROLLER),),
    wire.Train: _ORDER_TO_TRAINER,
    wire.Trained: _WORD_OF_TRAINER,
    wire.Save: _ORDER_TO_TRAINER,
    wire.FinishSave: _ORDER_TO_TRAINER,
    wire.Saved: _WORD_OF_TRAINER,
    wire.FindCheckpoints: (Say(_CONTROLLER, _KEEPERS),),
    wire.FoundCheckpoints: (Say(_KEEPERS, _CONTROLLER),),
    wire.Restore: _ORDER_TO_TRAINER,
    wire.Restored: _WORD_OF_TRAINER,
    wire.LendCheckpoint: (Say(_CONTROLLER, _KEEPERS),),
    wire.TakeCheckpoint: (Say(_CONTROLLER, _KEEPERS),),
    wire.CheckpointTaken: (Say(_KEEPERS, _CONTROLLER),),
    wire.ListCheckpoint: _BETWEEN_KEEPERS,
    wire.CheckpointListed: _BETWEEN_KEEPERS,
    wire.ReadCheckpoint: _BETWEEN_KEEPERS,
    wire.CheckpointRead: _BETWEEN_KEEPERS,
    wire.Sleep: _ORDER,
    wire.Wake: _ORDER,
    wire.WanPiece: _BETWEEN_RANKS,
    wire.WanReady: _BETWEEN_RANKS,
    wire.WanFailed: _BETWEEN_RANKS,
    wire.WanProbe: _BETWEEN_RANKS,
    wire.WanProbed: _BETWEEN_RANKS,
    wire.StoreAsk: _BETWEEN_RANKS,
    wire.StoreAnswer: _BETWEEN_RANKS,
}

# What is asked, and what answers it; so does `Failed`.
ANSWERS: Mapping[type[Tagged], tuple[type[Tagged], ...]] = {
    wire.LinkStats: (wire.LinkStatsReply,),
    wire.Measure: (wire.LinkMeasured,),
    wire.Ballast: (wire.Done,),
    wire.Generate: (wire.Generated,),
    wire.Publish: (wire.Exported,),
    wire.FinishPublish: (wire.Published,),
    wire.CatchUp: (wire.Published,),
    wire.WeightsEnd: (wire.WeightsApplied, wire.WeightsRejected),
    wire.Score: (wire.Scored,),
    wire.Train: (wire.Trained,),
    wire.Save: (wire.Saved,),
    wire.FinishSave: (wire.Saved,),
    wire.FindCheckpoints: (wire.FoundCheckpoints,),
    wire.Restore: (wire.Restored,),
    wire.LendCheckpoint: (wire.Done,),
    wire.TakeCheckpoint: (wire.CheckpointTaken,),
    wire.ListCheckpoint: (wire.CheckpointListed,),
    wire.ReadCheckpoint: (wire.CheckpointRead,),
    wire.Sleep: (wire.Done,),
    wire.Wake: (wire.Done,),
    wire.WanProbe: (wire.WanProbed,),
    wire.StoreAsk: (wire.StoreAnswer,),
}
_ANSWERS_ONLY = frozenset(answer for answers in ANSWERS.values() for answer in answers)
_EITHER = frozenset({wire.Failed, wire.Undeliverable})


class Authority(Protocol):
    """What a member or gateway takes from whom."""

    def refusal(self, message: wire.Message, header: wire.Header, receiver: str) -> str | None:
        """Return why `receiver` does not take a message; None where its source may say it."""

    def answers(self, question: type[Tagged], message: wire.Message) -> bool:
        """Whether a message answers a question of this type, be it with an error."""


class OfTheTable:
    """Who may say what is what the table says."""

    def refusal(self, message: wire.Message, header: wire.Header, receiver: str) -> str | None:
        """Return why `receiver` does not take a message; None where its source may say it."""
        kind, source, at_home = type(message), header.source, wire.site_of(header.source) == wire.site_of(receiver)
        roles = wire.role_of(source), wire.role_of(receiver)
        said = [say for say in AUTHORITY[kind] if roles[0] in say.sources and roles[1] in say.receivers]
        if not any(at_home or not say.home for say in said):
            return f"{kind.__name__} is not for {source} to say to {receiver}"
        if kind not in _EITHER and (kind in _ANSWERS_ONLY) != (header.reply_to is not None):
            return f"{kind.__name__} of {source} is {'no' if kind in _ANSWERS_ONLY else 'an'} answer"
        if isinstance(message, wire.Undeliverable):
            known = wire.site_of(receiver), wire.site_of(message.receiver)
            if wire.site_of(source) not in known:
                return f"{source} cannot know that {message.receiver} cannot be reached"
        return None

    def answers(self, question: type[Tagged], message: wire.Message) -> bool:
        """Whether a message answers a question of this type, be it with an error."""
        return isinstance(message, (*ANSWERS.get(question, ()), *_EITHER))
