"""Who takes part: waits for READY of every member, then watches that each still lives."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from hetrl.errors import GangTimeoutError, HetrlError, error_of
from hetrl.runtime import wire
from hetrl.runtime.rl.turns import Turns
from hetrl.runtime.run.deaths import ReleasedError
from hetrl.runtime.transport.member import DeadlineError, Member
from hetrl.workload import ACTOR_GENERATION

# A rank that stands still holds up all others of its world, and nobody takes its place.
SILENCE_SECONDS, RANK_SILENCE_SECONDS = 60.0, 12.0
POLL_SECONDS = 1.0
CHECK_SECONDS = 0.5  # whether all still speak; not at each word of each of a thousand members
RETURN_SECONDS = 20.0  # what was sent to a member that was started again comes back for so long
LAST_WORD_SECONDS = 5.0  # a member that gives up at the deadline says why
WORD_CHARACTERS = 200  # of what a rank says that it does


class _MemberLost(Exception):  # noqa: N818 - it says what happened to the member
    """A member, or a whole site, cannot take part any more."""

    def __init__(self, member: str, error: HetrlError) -> None:
        super().__init__(str(error))
        self.member, self.error = member, error


class Membership:
    """The members that a controller waits for and watches, and the `ranks` behind them, which it watches only.

    `killed` returns those that are known to have been ended by a signal, and by which, `released` the sites whose
    replicas of generation the run is to do without.
    """

    def __init__(
        self,
        member: Member,
        expected: Sequence[str],
        on_ready: Callable[[str, wire.Join], None],
        ranks: Sequence[str] = (),
        killed: Callable[[], Mapping[str, str]] = dict,
        released: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._killed, self._released, self._looked = killed, released, 0.0
        self._member, self._expected, self._on_ready = member, tuple(expected), on_ready
        self._ranks = frozenset(ranks)
        self._last_seen = dict.fromkeys(expected, time.monotonic())
        self._last_word: dict[str, str] = {}
        self._ending: dict[str, None] = {}  # sites whose job Slurm ends soon
        self._returned: dict[str, float] = {}  # who was started again, and when it was READY
        self._on_ending: Callable[[str], None] = lambda site: None
        self._on_back: Callable[[str], bool] = lambda member: False
        self._begun, self._failed = False, set[str]()
        self._checked = time.monotonic()
        self._connected = {name: asyncio.Event() for name in expected}
        self.joined: dict[str, wire.Join] = {}

    async def gather(
        self, queue_seconds: float, ready_seconds: float, turns: Turns, late: Collection[str] = (), enough: int = 0
    ) -> tuple[str, ...]:
        """Wait until everyone is READY, but of those that may come `late` only so many; then send GO.

        Returns those that are not there; they are not watched until they are. Raises GangTimeoutError naming those that
        said nothing for `queue_seconds`, as members do whose job waits in a queue, or those that are not ready so long
        after the last one did. Tasks that share devices start one after the other.
        """
        began = time.monotonic()
        starting = asyncio.ensure_future(turns.start(self.connected, queue_seconds + ready_seconds))
        heard: float | None = None  # when the last one said something
        try:
            while (missing := self._missing(late, enough)) or not starting.done():
                absent = [name for name in missing if not self._connected[name].is_set()]
                now = time.monotonic()
                if absent and now > began + queue_seconds + LAST_WORD_SECONDS:
                    raise GangTimeoutError(
                        f"{', '.join(absent)}: no word within {queue_seconds:g} s; their jobs wait in the queue or did "
                        "not start: look into their logs, or raise launch.queue_timeout"
                    )
                heard = None if absent else heard or now
                if heard is not None and now > heard + ready_seconds + LAST_WORD_SECONDS:
                    raise GangTimeoutError(
                        f"{', '.join(missing)}: not ready within {ready_seconds:g} s; look into their logs, "
                        "or raise launch.gang_timeout"
                    )
                await self._hear_of_start(late, enough)
                if starting.done():
                    starting.result()
        finally:
            starting.cancel()
        late_yet = tuple(name for name in self._expected if name not in self.joined)
        self._last_seen |= dict.fromkeys(self._ranks, time.monotonic())
        for name in late_yet:
            del self._last_seen[name]
        self._begun = True
        await self._member.send(tuple(self.joined), wire.Go())
        return late_yet

    def _missing(self, late: Collection[str], enough: int) -> list[str]:
        """Return those that the run cannot begin without, of the `late` all as long as too few are there."""
        missing = [name for name in self._expected if name not in self.joined]
        if sum(name in self.joined for name in late) < enough:
            return missing
        return [name for name in missing if name not in late]

    async def _hear_of_start(self, late: Collection[str], enough: int) -> None:
        """Take one message; that one of the `late` failed is no matter as long as enough others may come."""
        try:
            await self._hear()
        except _MemberLost as lost:
            self._failed.add(lost.member)
            self.joined.pop(lost.member, None)
            if lost.member not in late or len({*late} - self._failed) < enough:
                raise lost.error from None
        self._failed -= self.joined.keys()

    @property
    def living(self) -> tuple[str, ...]:
        """Return the members that were heard and are not lost."""
        return tuple(name for name, heard in self._connected.items() if heard.is_set() and name in self._last_seen)

    async def connected(self, name: str) -> None:
        """Wait for the first word of a member."""
        await self._connected[name].wait()

    async def watch(
        self,
        spare: Callable[[str, HetrlError], bool],
        back: Callable[[str], bool] = lambda member: False,
        ending: Callable[[str], None] = lambda site: None,
    ) -> None:
        """Hear the members for as long as the run lasts; raises HetrlError naming one that failed or fell silent.

        Of each such member `spare` is asked first whether the run goes on without it, and it is not watched any more.
        Of one that is READY once more, as it was started again, `back` is asked whether it takes part again. `ending`
        is told each site whose job Slurm ends soon.
        """
        self._checked, self._on_ending, self._on_back = time.monotonic(), ending, back
        for site in self._ending:
            ending(site)
        while True:
            lost = await self._ended()
            try:
                await self._hear()
                while self._member.has_mail:  # nobody counts as silent whose word is there
                    await self._hear()
                lost += self._silent() if time.monotonic() - self._checked >= CHECK_SECONDS else []
            except _MemberLost as told:
                lost.append(told)
            for one in lost:
                if not spare(one.member, one.error):
                    raise one.error from None
                self._last_seen.pop(one.member, None)

    def _silent(self) -> list[_MemberLost]:
        """Return those of whom nothing was heard for too long, or that cannot be reached."""
        now = time.monotonic()
        deaf_seconds, self._checked = now - self._checked - CHECK_SECONDS - POLL_SECONDS, now
        if deaf_seconds > 0:  # this process stood still: what was said meanwhile is yet to be heard
            self._last_seen = {name: seen + deaf_seconds for name, seen in self._last_seen.items()}
        lost = []
        for name, seen in self._last_seen.items():
            if cause := self._member.links.why_given_up(name):
                lost.append(_MemberLost(name, HetrlError(f"{wire.site_of(name)}: {name} cannot be reached: {cause}")))
                continue
            limit_seconds = RANK_SILENCE_SECONDS if name in self._ranks else SILENCE_SECONDS
            if self._member.links.are_out(name):  # how long that may last, the gateways know
                self._last_seen[name] = now
            elif now - seen > limit_seconds:
                word = f" (its last word: in {self._last_word[name]})" if name in self._last_word else ""
                silent = f"{name} has been silent for {limit_seconds:g} s{word}; look into its log"
                lost.append(_MemberLost(name, HetrlError(f"{wire.site_of(name)}: {silent}")))
        return lost

    async def _ended(self) -> list[_MemberLost]:
        """Look now and then who was killed, or given back, which tells it sooner than silence."""
        if time.monotonic() - self._looked < POLL_SECONDS:
            return []
        killed, released = await asyncio.to_thread(lambda: (self._killed(), self._released()))
        self._looked = time.monotonic()  # a look may take longer than it is until the next
        lost = []
        for name in self._last_seen:
            site = wire.site_of(name)
            if how := killed.get(name):
                hint = " (out of memory?)" if how == "SIGKILL" else ""
                cause = f"{site}: {name} was killed by {how}{hint}; look into its log and that of its job"
                lost.append(_MemberLost(name, HetrlError(cause)))
            elif site in released and wire.role_of(name) == ACTOR_GENERATION:
                lost.append(_MemberLost(name, ReleasedError(f"{site}: its rollouts were given back (hetrl release)")))
        return lost

    async def _hear(self) -> None:
        """Take one message, or none within the poll interval."""
        try:
            envelope = await self._member.receive(POLL_SECONDS)
        except DeadlineError:
            return
        source = envelope.header.source
        if source in self._last_seen:  # not a gateway, and nobody who was spared
            self._last_seen[source] = time.monotonic()
        if source in self._connected:
            self._connected[source].set()
        match envelope.message:
            case wire.Heartbeat(doing=doing, ending=ending) if source in self._last_seen or source in self._ranks:
                if doing and source in self._ranks:
                    self._last_word[source] = doing[:WORD_CHARACTERS]
                if ending and (site := wire.site_of(source)) not in self._ending:
                    self._ending[site] = None
                    self._on_ending(site)
            case wire.Join() as join if source in self._expected:
                self.joined[source] = join
                self._on_ready(source, join)
                if self._begun and self._on_back(source):
                    self._last_seen[source] = self._returned[source] = time.monotonic()
                    await self._member.send((source,), wire.Go())
            case wire.Failed(cause=cause, exit_code=exit_code):
                raise _MemberLost(source, error_of(exit_code, f"{source}: {cause}"))
            case wire.Undeliverable(receiver=receiver, cause=cause):
                if time.monotonic() - self._returned.get(receiver, -math.inf) < RETURN_SECONDS:
                    return
                unreachable = f"{wire.site_of(receiver)}: {receiver} cannot be reached: {cause}"
                raise _MemberLost(receiver, HetrlError(unreachable))
