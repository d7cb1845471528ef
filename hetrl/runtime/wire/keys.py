"""The CURVE keys of one run: one pair per site, known to every site of the run and to nobody else.

CURVE (https://rfc.zeromq.org/spec/26/) authenticates both ends and encrypts. A site's gateway and members share the
site's pair; the public keys of the sites are the list of those that may connect.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec

from hetrl.errors import HetrlError
from hetrl.files import read_private, write_private

_FILE = "key file"
# A Curve25519 key in Z85 (https://rfc.zeromq.org/spec/32/).
Key = Annotated[str, msgspec.Meta(min_length=40, max_length=40)]


@dataclass(frozen=True)
class SiteKeys:
    """What one site must know: its own pair and the public keys of the other sites (Z85)."""

    site: str
    public: Key
    secret: Key = field(repr=False)
    peers: dict[str, Key]

    def site_by_key(self) -> dict[str, str]:
        """Return the site that owns each public key of the run, this one included."""
        return {self.public: self.site, **{public: site for site, public in self.peers.items()}}


def make_run_keys(sites: Sequence[str]) -> dict[str, SiteKeys]:
    """Make a key pair per site; raises HetrlError where pyzmq is missing or lacks CURVE."""
    try:
        import zmq
    except ImportError as error:
        raise HetrlError("pyzmq is not installed here, and a run needs its keys; install pyzmq") from error
    if not zmq.has("curve"):
        raise HetrlError("this pyzmq was built without CURVE; install the pyzmq wheel from PyPI")
    pairs = {site: tuple(key.decode() for key in zmq.curve_keypair()) for site in sites}
    return {
        site: SiteKeys(
            site=site,
            public=public,
            secret=secret,
            peers={other: pair[0] for other, pair in pairs.items() if other != site},
        )
        for site, (public, secret) in pairs.items()
    }


def write_keys(path: Path | str, keys: SiteKeys) -> None:
    """Write one site's keys to a file that only its owner can read; raises HetrlError when it exists already."""
    write_private(path, json.dumps(asdict(keys)), _FILE)


def read_keys(path: Path | str) -> SiteKeys:
    """Read one site's keys; raises HetrlError when others can read the file or it is not a key file."""
    try:
        return msgspec.json.decode(read_private(path, _FILE), type=SiteKeys)
    except msgspec.MsgspecError:
        # The cause is cut off: its text may quote the file.
        raise HetrlError(f"{path}: not a key file of hetrl; submit the run again to write it") from None
