"""The CURVE keys of one run: one pair per site, known to every site of the run and to nobody else.

CURVE (https://rfc.zeromq.org/spec/26/) authenticates both ends and encrypts. A site's gateway and members share the
site's pair; the public keys of the sites are the list of those that may connect.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hetrl.errors import HetrlError

_KEY_LENGTH = 40  # a Curve25519 key in Z85, https://rfc.zeromq.org/spec/32/


@dataclass(frozen=True)
class SiteKeys:
    """What one site must know: its own pair and the public keys of the other sites (Z85)."""

    site: str
    public: str
    secret: str = field(repr=False)
    peers: dict[str, str]

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
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise HetrlError(f"{path}: the key file exists already; a run never reuses keys, remove it first") from error
    except OSError as error:
        raise HetrlError(f"{path}: cannot write the key file ({error.strerror})") from error
    with os.fdopen(descriptor, "w") as file:
        json.dump(asdict(keys), file)


def read_keys(path: Path | str) -> SiteKeys:
    """Read one site's keys; raises HetrlError when others can read the file or it is not a key file."""
    try:
        with Path(path).open() as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & 0o077:
                raise HetrlError(
                    f"{path}: others can read this key file (mode {mode & 0o777:03o}); chmod 600 {path}, "
                    "and start the run again if they may have read it"
                )
            return _parse(json.load(file))
    except OSError as error:
        raise HetrlError(f"{path}: cannot read the key file ({error.strerror})") from error
    except (ValueError, KeyError, TypeError):
        # The cause is cut off: its text may quote the file.
        raise HetrlError(f"{path}: not a key file of hetrl; submit the run again to write it") from None


def _parse(raw: dict[str, object]) -> SiteKeys:
    """Build the keys from JSON; raises ValueError, TypeError or KeyError on anything else."""
    site, public, secret, peers = (raw[name] for name in ("site", "public", "secret", "peers"))
    if not (isinstance(site, str) and isinstance(public, str) and isinstance(secret, str) and isinstance(peers, dict)):
        raise TypeError("wrong types")
    if any(not isinstance(key, str) or len(key) != _KEY_LENGTH for key in (public, secret, *peers.values())):
        raise ValueError("wrong keys")
    return SiteKeys(site=site, public=public, secret=secret, peers=dict(peers))
