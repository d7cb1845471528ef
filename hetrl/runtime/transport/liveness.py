"""When a TCP connection is taken for dead: a peer that has not acknowledged what was sent, or does not answer probes.

Linux: TCP_USER_TIMEOUT, and, where nothing is sent, TCP_KEEPIDLE + TCP_KEEPCNT x TCP_KEEPINTVL (tcp(7)).
"""

from __future__ import annotations

UNACKNOWLEDGED_MS = 15_000
KEEP_ALIVE_IDLE_SECONDS, KEEP_ALIVE_SECONDS, KEEP_ALIVE_COUNT = 15, 5, 3
