"""What gateways and a relay say to each other before bytes pass: one line each, in ASCII.

    relay    hetrl-relay/1 NONCE
    gateway  offer|dial RUN SITE MAC        MAC = HMAC-SHA256(key of the run, NONCE and the words before it)
    relay    waiting                        the gateway is known; nobody is on the other side yet
    relay    paired                         from here on, bytes of the other side
    relay    refused WHY                    instead of either, and then the connection ends

RUN and SITE are percent-encoded. The relay holds one secret, each run a key that follows from it: a run's key opens
nothing of another run. Neither crosses the wire, and a line that was overheard fits no other nonce.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from urllib.parse import quote, unquote

from hetrl.errors import HetrlError

LINE_BYTES = 512
WAITING, PAIRED = b"waiting\n", b"paired\n"
OFFER, DIAL = "offer", "dial"
SECRET_LETTERS = 64

_MAGIC = "hetrl-relay/1"
_GREETING = re.compile(rf"{_MAGIC} ([0-9a-f]{{32}})\n", re.ASCII)
_REQUEST = re.compile(rf"({OFFER}|{DIAL}) ([A-Za-z0-9_.~%-]+) ([A-Za-z0-9_.~%-]+) ([0-9a-f]{{64}})\n", re.ASCII)
_REFUSED = "refused "


class WrongKeyError(HetrlError):
    """Somebody does not know the key of the run that he names."""


@dataclass(frozen=True)
class Request:
    """`offer`: connections to this site's gateway are welcome here; `dial`: connect me to that site's gateway."""

    role: str
    run: str
    site: str

    @property
    def counterpart(self) -> Request:
        """Return the request that this one is paired with."""
        return Request(DIAL if self.role == OFFER else OFFER, self.run, self.site)


def make_secret() -> str:
    """Return a relay's secret: 256 random bits in hexadecimal digits."""
    return secrets.token_hex(SECRET_LETTERS // 2)


def key_of_run(secret: str, run: str) -> bytes:
    """Return the key that gateways of `run` show to the relay with this secret."""
    return hmac.digest(secret.encode(), f"run {run}".encode(), hashlib.sha256)


def greeting() -> tuple[str, bytes]:
    """Return a nonce that was never used, and the relay's first line with it."""
    nonce = secrets.token_hex(16)
    return nonce, f"{_MAGIC} {nonce}\n".encode()


def nonce_of(line: bytes) -> str:
    """Return the nonce of a relay's first line; raises ValueError where it is none."""
    match = _GREETING.fullmatch(line.decode("ascii"))
    if match is None:
        raise ValueError("not a relay's greeting")
    return match[1]


def request_line(request: Request, nonce: str, key: bytes) -> bytes:
    """Return a gateway's line. Raises HetrlError for names that do not fit into one."""
    words = _words(request)
    line = f"{words} {_mac(words, nonce, key)}\n".encode()
    if len(line) > LINE_BYTES:
        raise HetrlError(f"{request.site}: the names of the run and the site are too long for a relay; shorten them")
    return line


def parse_request(line: bytes, nonce: str, secret: str) -> Request:
    """Return the request of a gateway that knows its run's key.

    Raises ValueError for a line of another form, WrongKeyError for a key that is not the run's.
    """
    match = _REQUEST.fullmatch(line.decode("ascii"))
    if match is None:
        raise ValueError("not a request")
    role, run, site = match[1], unquote(match[2], errors="strict"), unquote(match[3], errors="strict")
    request = Request(role, run, site)
    if not hmac.compare_digest(match[4], _mac(_words(request), nonce, key_of_run(secret, run))):
        raise WrongKeyError("the key is not that of this relay and run")
    return request


def refusal(why: str) -> bytes:
    """Return the relay's last line to somebody it refuses."""
    return f"{_REFUSED}{why}\n".encode("ascii", "replace")


def why_refused(line: bytes) -> str | None:
    """Return why the relay refused, None where the line is no refusal."""
    text = line.decode("ascii", "replace")
    return text.removeprefix(_REFUSED).strip() if text.startswith(_REFUSED) else None


def _words(request: Request) -> str:
    return f"{request.role} {quote(request.run, safe='')} {quote(request.site, safe='')}"


def _mac(words: str, nonce: str, key: bytes) -> str:
    return hmac.new(key, f"{nonce} {words}".encode(), hashlib.sha256).hexdigest()
