"""The run group: who takes part in a run at the moment, agreed by epochs.

The controller hosts it; every gang rank and one agent per rollout replica is a member. Each change of membership (a
join, a leave, a member declared dead) begins the next epoch, which `Go` tells everybody. Barriers and shared values
belong to an epoch: one that names another epoch is refused by name, and its member decides anew under the present one.

    Join, Leave, declare_dead  ->  epoch + 1, Go to all, barriers of the old epoch fail
    Arrive                     ->  Done to all once every member has arrived
    Share                      ->  the value to all
    Failed                     ->  Abort to all, with the cause
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.transport.member import Envelope, Member


class Post(NamedTuple):
    """A message to send; `reply_to` as in a header."""

    to: tuple[str, ...]
    message: wire.Message
    reply_to: int | None = None


@dataclass(frozen=True)
class RunGroup:
    """What the host knows; every transition returns the next state and what to send."""

    epoch: int = 0
    members: tuple[str, ...] = ()
    left: Mapping[str, str] = field(default_factory=dict)  # of the last change: who and why
    arrived: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # barrier -> member -> request

    def start(self, members: Sequence[str]) -> tuple[RunGroup, list[Post]]:
        """Begin the first epoch."""
        return self._change(tuple(dict.fromkeys(members)), {})

    def join(self, member: str) -> tuple[RunGroup, list[Post]]:
        """Take a member in; one that is in already came back, and that is a change as well."""
        others = tuple(other for other in self.members if other != member)
        return self._change((*others, member), {})

    def leave(self, member: str, why: str) -> tuple[RunGroup, list[Post]]:
        """Go on without a member that left or was declared dead; a stranger changes nothing."""
        if member not in self.members:
            return self, []
        return self._change(tuple(other for other in self.members if other != member), {member: why})

    def arrive(self, member: str, message: wire.Arrive, request: int) -> tuple[RunGroup, list[Post]]:
        """A member stands at a barrier: answer all of its members once they are complete."""
        if refusal := self._refusal(member, message.epoch, f"barrier {message.barrier}"):
            return self, [Post((member,), wire.Failed(cause=refusal), request)]
        here = {**self.arrived.get(message.barrier, {}), member: request}
        if set(here) != set(self.members):
            return replace(self, arrived={**self.arrived, message.barrier: here}), []
        others = {name: who for name, who in self.arrived.items() if name != message.barrier}
        posts = [Post((other,), wire.Done(), number) for other, number in here.items()]
        return replace(self, arrived=others), posts

    def share(self, member: str, message: wire.Share, request: int) -> tuple[RunGroup, list[Post]]:
        """Hand a member's value to everybody, the member included."""
        if refusal := self._refusal(member, message.epoch, message.name):
            return self, [Post((member,), wire.Failed(cause=refusal), request)]
        return self, [Post(self.members, message), Post((member,), wire.Done(), request)]

    def abort(self, cause: str) -> list[Post]:
        """End the run at every member."""
        return [Post(self.members, wire.Abort(cause=cause))] if self.members else []

    def _change(self, members: tuple[str, ...], left: dict[str, str]) -> tuple[RunGroup, list[Post]]:
        following = RunGroup(self.epoch + 1, members, left)
        posts = [
            Post((member,), wire.Failed(cause=following._over(self.epoch, f"barrier {barrier}")), request)
            for barrier, here in self.arrived.items()
            for member, request in here.items()
            if member in members
        ]
        if members:
            posts.append(Post(members, wire.Go(epoch=following.epoch, members=members, left=left)))
        return following, posts

    def _refusal(self, member: str, epoch: int, what: str) -> str | None:
        """Return why a message is not taken."""
        if member not in self.members:
            return f"{what}: {member} is no member in epoch {self.epoch}; join first"
        return None if epoch == self.epoch else self._over(epoch, what)

    def _over(self, epoch: int, what: str) -> str:
        """Say that a message belongs to another epoch."""
        gone = ", ".join(f"{member} left ({why})" for member, why in self.left.items()) or "a member joined"
        return f"{what}: epoch {epoch} is over, this is epoch {self.epoch} since {gone}"


class RunGroupHost:
    """The controller's side: takes the members' messages and sends what follows."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self.group = RunGroup()

    async def start(self, members: Sequence[str]) -> None:
        """Begin the first epoch."""
        await self._step(self.group.start(members))

    async def declare_dead(self, address: str, why: str) -> None:
        """Go on without a member that does not answer."""
        self._member.forget(address)
        await self._step(self.group.leave(address, why))

    async def abort(self, cause: str) -> None:
        """End the run at every member; each raises `RunAborted` with this cause."""
        await self._post(self.group.abort(cause))

    async def hear(self, envelope: Envelope) -> bool:
        """Take a message; False when it is not for the run group."""
        source, number = envelope.header.source, envelope.header.id
        match envelope.message:
            case wire.Join():
                await self._step(self.group.join(source))
            case wire.Leave():
                await self._step(self.group.leave(source, "it asked to leave"))
                await self._member.reply(envelope, wire.Done())
            case wire.Arrive() as arrive:
                await self._step(self.group.arrive(source, arrive, number))
            case wire.Share() as share:
                await self._step(self.group.share(source, share, number))
            case wire.Failed(cause=cause):
                await self.abort(f"{source}: {cause}")
            case _:
                return False
        return True

    async def _step(self, transition: tuple[RunGroup, list[Post]]) -> None:
        self.group, posts = transition
        await self._post(posts)

    async def _post(self, posts: list[Post]) -> None:
        for post in posts:
            await self._member.send(post.to, post.message, reply_to=post.reply_to)


class RunGroupMember:
    """A member's side: the present epoch, and what it asks the host."""

    def __init__(self, member: Member, host: str) -> None:
        self._member, self._host = member, host
        self._changed = asyncio.Condition()
        self._values: dict[str, bytes] = {}
        self.epoch = 0
        self.members: tuple[str, ...] = ()
        self.left: dict[str, str] = {}

    async def hear(self, envelope: Envelope) -> bool:
        """Take a message; False when it is not for the run group, or of an epoch that is over."""
        match envelope.message:
            case wire.Go(epoch=epoch, members=members, left=left) if epoch > self.epoch:
                self.epoch, self.members, self.left = epoch, members, left
                self._values.clear()
            case wire.Share(epoch=epoch, name=name, value=value) if epoch == self.epoch:
                self._values[name] = value
            case _:
                return False
        async with self._changed:
            self._changed.notify_all()
        return True

    async def entered(self, epoch: int, timeout_seconds: float) -> None:
        """Wait until this epoch or a later one has begun."""
        async with self._changed, asyncio.timeout(timeout_seconds):
            await self._changed.wait_for(lambda: self.epoch >= epoch)

    async def barrier(self, name: str, timeout_seconds: float) -> None:
        """Wait for every member of the epoch; raises HetrlError when the epoch ends first, saying who left."""
        await self._ask(wire.Arrive(epoch=self.epoch, barrier=name), f"barrier {name}", timeout_seconds)

    async def share(self, name: str, value: bytes, timeout_seconds: float) -> None:
        """Give every member of the epoch a value under a name."""
        await self._ask(wire.Share(epoch=self.epoch, name=name, value=value), f"share {name}", timeout_seconds)

    async def value(self, name: str, timeout_seconds: float) -> bytes:
        """Wait for a value that a member shares in this epoch; raises HetrlError when the epoch ends first."""
        epoch = self.epoch
        try:
            async with self._changed, asyncio.timeout(timeout_seconds):
                await self._changed.wait_for(lambda: name in self._values or self.epoch != epoch)
        except TimeoutError:
            raise HetrlError(
                f"{self._member.address}: nobody shared {name} within {timeout_seconds:g} s in epoch {epoch}; "
                f"look into the log of {self._host}"
            ) from None
        if self.epoch != epoch:
            raise HetrlError(f"{self._member.address}: epoch {epoch} is over, nobody shared {name} in it")
        return self._values[name]

    async def leave(self, timeout_seconds: float) -> None:
        """Be no member from the next epoch on."""
        await self._ask(wire.Leave(epoch=self.epoch), "leave", timeout_seconds)

    async def abort(self, cause: str) -> None:
        """End the run everywhere."""
        await self._member.send(self._host, wire.Failed(cause=cause))

    async def _ask(self, message: wire.Message, doing: str, timeout_seconds: float) -> None:
        await self._member.request(self._host, message, timeout_seconds=timeout_seconds, doing=doing)
