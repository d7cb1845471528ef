"""Digests of weights: of each piece of a tensor, and of a whole version over those of its pieces.

A version is a tree of two levels, so that pieces are hashed side by side, as they come, and a version in which a piece
changed needs the digest of that piece alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from blake3 import blake3

from hetrl.runtime.transport.chunks import Buffer

Leaves = Mapping[tuple[str, int], str]  # name of a tensor and first byte of a piece -> digest of the piece


def digest_of(data: Buffer) -> str:
    """Return the BLAKE3 digest of a buffer, its first 16 bytes in hex (https://github.com/BLAKE3-team/BLAKE3-specs)."""
    return blake3(data).hexdigest(16)


def version_digest(leaves: Leaves) -> str:
    """Return the digest of a whole version: that of a line per piece, in the order of names and bytes."""
    lines = (f"{name}\0{offset}\0{leaves[name, offset]}\n" for name, offset in sorted(leaves))
    return digest_of("".join(lines).encode())
