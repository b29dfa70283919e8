"""Keys of blocks in prefix caches, the same in every engine and router: a chain of digests over token ids. Pure.

vLLM's own block hashes depend on its version, its hash function and, for some, on the process. So a block's key here is
the BLAKE2b of its parent's key and its own token ids; that of a prompt's first block begins with a seed of all else
that decides about KV: the model, the LoRA adapter, the client's ``cache_salt`` and the size of a block. 8 bytes: of a
million blocks, two have the same key by chance once in 37 million, and an index of them is only a hint.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvbus.wire import CACHE_KEY_BYTES

SLICE_BLOCKS = 64
_EMPTY = hashlib.blake2b(digest_size=CACHE_KEY_BYTES)  # to copy one takes less than to make one


@dataclass(frozen=True, slots=True)
class Prompt:
    """What decides about the KV of a prompt. ``lora``: the adapter's name, empty for the model itself."""

    model: str
    token_ids: Sequence[int]
    lora: str = ""
    salt: str = ""

    def slices(self, block_size: int) -> Iterator[tuple[int, ...]]:
        """The keys of its whole blocks, some at a time: who looks them up may stop early.

        Raises:
            ValueError: the ids are not integers of 32 bits.
        """
        data, parent = bytes_of(self.token_ids), seed_of(self.model, block_size, self.lora, self.salt)
        whole = len(self.token_ids) // block_size
        for first in range(0, whole, SLICE_BLOCKS):
            last = min(first + SLICE_BLOCKS, whole)
            keys = chain(parent, data[4 * first * block_size : 4 * last * block_size], block_size)
            parent = keys[-1]
            yield unpack(b"".join(keys))


def seed_of(model: str, block_size: int, lora: str = "", salt: str = "") -> bytes:
    """What stands for the parent of a prompt's first block."""
    words = (model, str(block_size), lora, salt)
    told = b"".join(struct.pack("<I", len(word)) + word for word in (each.encode(errors="replace") for each in words))
    return hashlib.blake2b(told, digest_size=CACHE_KEY_BYTES).digest()


def bytes_of(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian integers of 32 bits.

    Raises:
        ValueError: they are no such integers.
    """
    try:
        ids = array("I", token_ids)
    except (TypeError, OverflowError):
        raise ValueError("token ids are not integers of 32 bits") from None
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def chain(parent: bytes, data: bytes, block_size: int) -> list[bytes]:
    """The keys of the blocks whose token ids are ``data``, see :func:`bytes_of`; the rest of a block has none."""
    keys, step, fresh = [], 4 * block_size, _EMPTY.copy
    for at in range(0, len(data) - step + 1, step):
        digest = fresh()
        digest.update(parent + data[at : at + step])
        parent = digest.digest()
        keys.append(parent)
    return keys


def unpack(keys: bytes) -> tuple[int, ...]:
    """Keys as they are on the wire, as integers."""
    return struct.unpack(f"<{len(keys) // CACHE_KEY_BYTES}Q", keys)


def pack(keys: Sequence[int]) -> bytes:
    """The inverse of :func:`unpack`."""
    return struct.pack(f"<{len(keys)}Q", *keys)
