"""What holds a run together: membership, channels, links and their measurement."""

from __future__ import annotations

import msgspec

from hetrl.runtime.wire.header import Priority, Tagged

# ---- membership


class Join(Tagged, frozen=True, tag=True):
    """A member is up and ready to work (READY); `engines` are name -> version of what it runs."""

    ranks: int
    host: str
    pid: int
    engines: dict[str, str]


class Go(Tagged, frozen=True, tag=True):
    """Everyone is ready: the run begins."""


class Heartbeat(Tagged, frozen=True, tag=True):
    """A member lives, `doing` this, or the controller; of a gateway: a stream of its link that carries nothing else.

    `ending`: Slurm ends the job of the sender's site soon.
    """

    doing: str = ""
    ending: bool = False


class Abort(Tagged, frozen=True, tag=True):
    """The run ends at once; `cause` says what, where and what next."""

    cause: str


class Finish(Tagged, frozen=True, tag=True):
    """The run is complete: close and exit with 0."""


class Failed(Tagged, frozen=True, tag=True):
    """The answer to a request that could not be fulfilled, or a member's last word; the exit code is its kind."""

    cause: str
    exit_code: int = 1


class Done(Tagged, frozen=True, tag=True):
    """The plain answer to a request without results."""


class Undeliverable(Tagged, frozen=True, tag=True):
    """A message could not be handed over; `receiver`, a member or a whole site, is unknown or not connected."""

    receiver: str
    cause: str


# ---- channels


class Hello(Tagged, frozen=True, tag=True):
    """A member to its gateway: this connection is mine, for control messages or for the rest; my counters so far.

    `offences`: how many messages of each other member it refused.
    """

    bulk: bool
    chunks_resent: int = 0
    chunks_duplicate: int = 0
    offences: dict[str, int] = msgspec.field(default_factory=dict)


class Acknowledged(Tagged, frozen=True, tag=True):
    """What a receiver has of one stream: chunks below `cumulative` and in the half-open `ranges`; bytes it took out.

    `incarnation` is the sender's that it speaks of, `answers` the `Probe` that asked (0: nobody did).
    """

    priority: Priority
    incarnation: int
    stream: int
    cumulative: int
    ranges: tuple[tuple[int, int], ...]
    taken_bytes: int
    answers: int = 0


class Probe(Tagged, frozen=True, tag=True):
    """What have you got of this stream? It queues behind the chunks that it asks about."""

    stream: int
    number: int


class LinkOut(Tagged, frozen=True, tag=True):
    """A gateway to its members: this site does not answer at present; what is sent there waits."""

    site: str


class LinkRestored(Tagged, frozen=True, tag=True):
    """A gateway to its members: the link to this site was lost and is back, and what was under way may be lost."""

    site: str


class GatewayEnded(Tagged, frozen=True, tag=True):
    """The gateway of this site has ended for good, behind the members there: to other gateways, by them to members."""

    site: str


# ---- links


class LinkCounters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a gateway sent to and received from another site since its start: messages, and the bytes of their frames.

    `seconds_sending`: with something in its queues; `round_trip_seconds`: of a small message, smoothed, None while
    unknown; `reconnects`: connections that came back; `chunks_dropped`: for want of room in the queue;
    `peak_queued_bytes`: the most that ever waited, control messages and the rest each at its own time.
    """

    messages_sent: int = 0
    bytes_sent: int = 0
    messages_received: int = 0
    bytes_received: int = 0
    seconds_sending: float = 0.0
    round_trip_seconds: float | None = None
    reconnects: int = 0
    chunks_dropped: int = 0
    peak_queued_bytes: int = 0


class LinkStats(Tagged, frozen=True, tag=True):
    """To a gateway (`site/gateway/0`): what crossed your links so far? Answered by `LinkStatsReply`."""


class LinkStatsReply(Tagged, frozen=True, tag=True):
    """Counters per other site and of the gateway as a whole, since its start.

    Connections refused for their key; messages refused, in all and of each site or member, by the gateway or by
    members of its site; connections that never got through the handshake, for whatever reason; chunks dropped
    because a member's queue was full, sent again by members, and dropped by members that had them already; the most
    bytes that ever waited for each member of the gateway's site.
    """

    links: dict[str, LinkCounters]
    refused: int
    malformed: int
    offences: dict[str, int] = msgspec.field(default_factory=dict)
    not_admitted: int = 0
    chunks_dropped: int = 0
    chunks_resent: int = 0
    chunks_duplicate: int = 0
    peak_queued_bytes: dict[str, int] = msgspec.field(default_factory=dict)


class Echo(Tagged, frozen=True, tag=True):
    """Between gateways: a sign of life; `seconds` is the clock of who asked, and comes back in the `EchoReply`."""

    seconds: float


class EchoReply(Tagged, frozen=True, tag=True):
    """The answer to an `Echo`, with the seconds that it carried."""

    seconds: float


# ---- measuring links (`hetrl.runtime.instruments.probe`)


class Measure(Tagged, frozen=True, tag=True):
    """To a probe: measure the way to the probe `target` for so long; answered by `LinkMeasured`."""

    target: str
    round_trips: int
    seconds: float


class LinkMeasured(Tagged, frozen=True, tag=True):
    """Every round trip of a small message, and the bytes that arrived in each interval under full load."""

    round_trip_seconds: tuple[float, ...]
    interval_seconds: float
    interval_bytes: tuple[int, ...]


class Ballast(Tagged, frozen=True, tag=True):
    """A load: its buffers mean nothing; answered by `Done`."""


ControlMessage = (
    Join
    | Go
    | Heartbeat
    | Abort
    | Finish
    | Failed
    | Done
    | Undeliverable
    | Hello
    | Acknowledged
    | Probe
    | LinkOut
    | LinkRestored
    | LinkStats
    | LinkStatsReply
    | GatewayEnded
    | Echo
    | EchoReply
    | Measure
    | LinkMeasured
    | Ballast
)
