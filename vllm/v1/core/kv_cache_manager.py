"""Block tables: of groups, of children, and of what the prefix cache has of a prompt.

A table covers whole blocks: position p stands in table[p // block_size]. Who holds what is drawn in `prefill_group`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from vllm.lora.request import LoRARequest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.prefill_group import GroupState, PrefillGroup
from vllm.v1.core.request import Child


def chain(parent: bytes, tokens: bytes | memoryview) -> bytes:
    """Digest of a full block: its token ids (int32, in order) and the digest of what stands before it."""
    return hashlib.sha256(b"".join((parent, tokens))).digest()


class KVCacheManager:
    """Gives blocks to groups and children, shares and copies them, and keeps the prefix cache's digests.

    Methods that take blocks expect the caller to have compared the need with `pool.num_free`.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.weights_version = 0

    @property
    def capacity(self) -> int:
        """Most tokens that one sequence can have in the cache."""
        return self.pool.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def root(self, lora_request: LoRARequest | None, cache_salt: str | None) -> bytes:
        """Digest before the first token: what else the KV of the same tokens depends on."""
        lora = None if lora_request is None else (lora_request.lora_int_id, lora_request.lora_name)
        text = repr((lora, cache_salt, self.weights_version))
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()

    # Groups

    def take_hits(self, group: PrefillGroup) -> int:
        """Start the group's empty table with the leading blocks that the prefix cache has; their number of tokens.

        At least the last prompt token is left to compute: its hidden row is wanted.
        """
        if not group.reads_cache:
            return 0
        size = 4 * self.block_size
        blocks: list[int] = []
        for index in range((group.prompt_len - 1) // self.block_size):
            tokens = group.prompt_bytes[size * index : size * (index + 1)]
            block = self.pool.find(self._digest(group, index), bytes(tokens))
            if block < 0:
                break
            blocks.append(block)
        self.pool.touch(blocks)
        group.blocks = blocks
        return len(blocks) * self.block_size

    def block_to_continue(self, group: PrefillGroup, start: int) -> int:
        """The partial block of `group.source`, if the `start` tokens of hits end where it begins; -1 if not."""
        source = group.source
        if source is None or source.state != GroupState.COMPLETE or source.root != group.root:
            return -1
        if len(source.blocks) == len(source.full_blocks):  # no partial one, or it has ended
            return -1
        if not len(source.full_blocks) * self.block_size == start < source.prompt_len < group.prompt_len:
            return -1
        if source.prompt_bytes != group.prompt_bytes[: len(source.prompt_bytes)]:
            return -1
        return source.blocks[-1]

    def extend_group(self, group: PrefillGroup, num_tokens: int) -> list[int]:
        """Make the table reach `num_tokens`; the blocks added."""
        blocks = self.pool.allocate(self.blocks_for(num_tokens) - len(group.blocks))
        group.blocks.extend(blocks)
        return blocks

    def complete_group(self, group: PrefillGroup) -> None:
        group.full_blocks = np.array(group.blocks[: group.prompt_len // self.block_size], np.intp)

    def release_group(self, group: PrefillGroup) -> None:
        """Give up the group's own references. Children in slots keep theirs (there are none, or all have ended)."""
        self.pool.release(group.blocks)
        group.blocks = []
        group.full_blocks = group.full_blocks[:0]
        group.num_computed = group.num_done = 0
        group.epoch += 1

    def register_prompt(self, group: PrefillGroup, start: int, end: int) -> None:
        """Prompt positions start .. end - 1 have been computed: the blocks filled thereby can be hit."""
        if group.root:
            size = 4 * self.block_size
            for index in range(start // self.block_size, end // self.block_size):
                tokens = bytes(group.prompt_bytes[size * index : size * (index + 1)])
                self.pool.register(group.blocks[index], self._digest(group, index), tokens)

    def _digest(self, group: PrefillGroup, index: int) -> bytes:
        digests = group.digests
        size = 4 * self.block_size
        while len(digests) <= index:
            at = size * len(digests)
            digests.append(chain(digests[-1] if digests else group.root, group.prompt_bytes[at : at + size]))
        return digests[index]

    # Children

    def fork_need(self, group: PrefillGroup, num_tokens: int) -> int:
        """Blocks that a child entering a slot with `num_tokens` tokens needs beside its COMPLETE group's."""
        need = self.blocks_for(num_tokens) - len(group.full_blocks)
        return need - 1 if self._can_adopt(group) else need

    def fork(self, child: Child, num_tokens: int) -> tuple[int, int] | None:
        """Give the child a table for `num_tokens` tokens on its COMPLETE group's prompt.

        Returns the (source, target) of the copy of the partial block, None when none is needed: the prompt ends with a
        block, or the child becomes the group's writer.
        """
        group = child.group
        own = self.blocks_for(num_tokens) - len(group.full_blocks)
        copy: tuple[int, int] | None = None
        self.pool.share(group.full_blocks)
        if self._can_adopt(group):
            group.writer = child
            # The writer will put other tokens behind the prompt than a former one may have done.
            self.pool.forget(group.blocks[-1])
            self.pool.touch(group.blocks[-1:])
            child.blocks = group.blocks + self.pool.allocate(own - 1)
        else:
            blocks = self.pool.allocate(own)
            if len(group.blocks) > len(group.full_blocks):
                copy = (group.blocks[-1], blocks[0])
            child.blocks = group.blocks[: len(group.full_blocks)] + blocks
        child.num_hashed = len(group.full_blocks)
        if group.root and child.num_hashed:
            child.digest = self._digest(group, child.num_hashed - 1)
        else:
            child.digest = group.root
        return copy

    def _can_adopt(self, group: PrefillGroup) -> bool:
        """Whether the next child in may write into the group's partial block."""
        return (
            len(group.blocks) > len(group.full_blocks) and group.writer is None and self.pool.ref(group.blocks[-1]) == 1
        )

    def merge_partial(self, child: Child) -> None:
        """The group gives up its partial block for the child's copy of it, and the child becomes the writer.

        For a RUNNING child with a copy, of a group without a writer: the same positions, in one block less.
        """
        group = child.group
        index = len(group.full_blocks)
        self.pool.release(group.blocks[index:])
        group.blocks[index] = child.blocks[index]
        self.pool.touch(group.blocks[index:])
        group.writer = child

    def release_child(self, child: Child) -> None:
        """Give up a child's table. Its group holds the shared part still."""
        group = child.group
        shared = len(group.full_blocks)
        self.pool.release(child.blocks[shared:])
        self.pool.unshare(group.full_blocks)
        if group.writer is child:
            group.writer = None
        child.blocks = []

    def register_output(self, child: Child, num_computed: int) -> None:
        """The KV of the child's first `num_computed` tokens is in its table: the blocks filled thereby can be hit."""
        group = child.group
        size = self.block_size
        while (child.num_hashed + 1) * size <= num_computed:
            start = child.num_hashed * size - group.prompt_len
            if start >= 0:
                tokens = child.tokens[start : start + size].tobytes()
            else:
                tokens = bytes(group.prompt_bytes[4 * start :]) + child.tokens[: start + size].tobytes()
            child.digest = chain(child.digest, tokens)
            self.pool.register(child.blocks[child.num_hashed], child.digest, tokens)
            child.num_hashed += 1

    # Debugging

    def check_integrity(self, groups: Iterable[PrefillGroup], children: Iterable[Child]) -> None:
        """Compare the reference counts with the tables of all groups and of all children in slots."""
        expected: npt.NDArray[np.int32] = np.zeros(self.pool.num_blocks, np.int32)
        for table in [*(group.blocks for group in groups), *(child.blocks for child in children)]:
            np.add.at(expected, np.array(table, np.intp), 1)
        self.pool.check_integrity(expected)
