"""The KV cache's blocks: who holds them, which are free, and which can be found again by their content.

A block is in exactly one of these places:

    held        refs > 0: in the tables of that many holders (children, prefill groups)
    plain       free, its content worth nothing; a stack, reused first, while it is still in the CPU's caches
    untouched   free, never handed out: the ids from `_untouched` up. Memory is touched lazily, so these wait
    cached      free, but its content can be found by its digest; least recently freed first. Reused last

so that without prefix caching freed blocks are always reused before untouched ones, and with it nothing that could be
hit is given up while there is other memory. Holders release their tables tail first: of one sequence the last blocks
go first, because the first ones are the likeliest to be hit.

A digest names the tokens of a full block and all that stand before it (see `kv_cache_manager.chain`); it may be
registered while the block is held or not at all. A hit is confirmed by comparing the block's token ids.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm.exceptions import IntegrityError


class BlockPool:
    """Reference counts, the free blocks, and the digests of `num_blocks` blocks with ids from 0."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"the KV cache needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._counts = array("i", bytes(4 * num_blocks))
        self.refs: npt.NDArray[np.int32] = np.frombuffer(self._counts, np.int32)  # the same memory, for vectors
        self._plain: list[int] = []
        self._untouched = 0
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._digests: list[bytes | None] = [None] * num_blocks
        self._tokens: list[bytes | None] = [None] * num_blocks
        self._by_digest: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._plain) + self.num_blocks - self._untouched + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by their content, held or free."""
        return len(self._by_digest)

    @property
    def usage(self) -> float:
        return 1.0 - self.num_free / self.num_blocks

    def ref(self, block: int) -> int:
        return self._counts[block]

    # Taking and giving back

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each; their old content is forgotten. The caller has checked `num_free`."""
        plain = self._plain
        if count <= len(plain):
            split = len(plain) - count
            blocks = plain[split:]
            del plain[split:]
            blocks.reverse()
        else:
            if count > self.num_free:
                raise IntegrityError(f"{count} blocks wanted, {self.num_free} of {self.num_blocks} are free")
            blocks = plain[::-1]
            plain.clear()
            fresh = min(count - len(blocks), self.num_blocks - self._untouched)
            blocks.extend(range(self._untouched, self._untouched + fresh))
            self._untouched += fresh
            for _ in range(count - len(blocks)):
                block, _none = self._cached.popitem(last=False)
                self.forget(block)
                blocks.append(block)
        for block in blocks:
            self._counts[block] = 1
        return blocks

    def share(self, blocks: npt.NDArray[np.intp]) -> None:
        """One more reference on each of these (distinct, held) blocks."""
        self.refs[blocks] += 1

    def unshare(self, blocks: npt.NDArray[np.intp]) -> None:
        """Take back `share`; somebody else still holds each of these blocks."""
        self.refs[blocks] -= 1

    def touch(self, blocks: Sequence[int]) -> None:
        """One more reference on each of these blocks, found by `find`: held, or free and cached."""
        for block in blocks:
            if not self._counts[block]:
                del self._cached[block]
            self._counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one reference on each block of a table (or the tail of one), in the table's order."""
        counts = self._counts
        for block in reversed(blocks):
            left = counts[block] - 1
            if left < 0:
                raise IntegrityError(f"block {block} is released but nobody holds it")
            counts[block] = left
            if not left:
                if self._digests[block] is None:
                    self._plain.append(block)
                else:
                    self._cached[block] = None

    # Content

    def register(self, block: int, digest: bytes, tokens: bytes) -> None:
        """The held, full `block` has this content from now on. Of two blocks with one content the first is kept."""
        if self._digests[block] is None and digest not in self._by_digest:
            self._digests[block] = digest
            self._tokens[block] = tokens
            self._by_digest[digest] = block

    def find(self, digest: bytes, tokens: bytes) -> int:
        """The block with this content, or -1. Its holders do not change: `touch` it before anything is allocated."""
        block = self._by_digest.get(digest, -1)
        if block >= 0 and self._tokens[block] != tokens:
            return -1
        return block

    def is_registered(self, block: int) -> bool:
        return self._digests[block] is not None

    def forget(self, block: int) -> None:
        """The content of `block` can be found no more. Its place among the free blocks is the caller's affair."""
        digest = self._digests[block]
        if digest is not None:
            del self._by_digest[digest]
            self._digests[block] = self._tokens[block] = None

    def reset(self) -> bool:
        """Forget all contents; False, and nothing done, while any block is held."""
        if self.num_free != self.num_blocks:
            return False
        self._plain.extend(reversed(self._cached))
        self._cached.clear()
        self._by_digest.clear()
        self._digests = [None] * self.num_blocks
        self._tokens = [None] * self.num_blocks
        return True

    # Debugging

    def check_integrity(self, expected: npt.NDArray[np.int32]) -> None:
        """Raise IntegrityError unless the counts equal `expected` [num_blocks] and every block is in one place."""
        wrong = np.flatnonzero(self.refs != expected)
        if wrong.size:
            first = [(int(b), int(self.refs[b]), int(expected[b])) for b in wrong[:8]]
            raise IntegrityError(f"{wrong.size} blocks with wrong reference counts; (block, count, holders): {first}")
        places = np.zeros(self.num_blocks, np.int32)
        np.add.at(places, np.array([*self._plain, *self._cached], np.intp), 1)
        places[self._untouched :] += 1
        wrong = np.flatnonzero(places != (expected == 0))
        if wrong.size:
            raise IntegrityError(
                f"blocks {wrong[:8].tolist()} stand {places[wrong[:8]].tolist()} times among the free ones, "
                f"with {expected[wrong[:8]].tolist()} references"
            )
        for block, digest in enumerate(self._digests):
            if digest is not None and self._by_digest.get(digest) != block:
                raise IntegrityError(f"block {block} has a digest that leads to {self._by_digest.get(digest)}")
            if (digest is None) != (self._tokens[block] is None):
                raise IntegrityError(f"block {block} has a digest or token ids, but not both")
            if digest is None and block in self._cached:
                raise IntegrityError(f"block {block} is among the cached ones without a digest")
        named = sum(digest is not None for digest in self._digests)
        if named != len(self._by_digest):
            raise IntegrityError(f"{len(self._by_digest)} digests lead to {named} blocks")
        for block in self._plain:
            if self._digests[block] is not None:
                raise IntegrityError(f"block {block} can be found by its content but is reused first")
