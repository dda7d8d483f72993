"""What the runner asks of a backend. numpy in, numpy out; tensors, devices and threads stay behind it.

A backend is made from a `DecoderSpec`, a dtype and a source of weights; the runner then calls, once per step,

    copy_blocks(pairs) -> forward(batch) -> sample(hidden, sampling)      (and token_logprobs for prompt logprobs)

Ownership: arrays given to a backend are read during the call only and may be reused by the caller afterwards. Arrays
returned belong to the caller. `Hidden` is opaque: it stands for the final, normed hidden rows of one `forward` and
stays valid until the next `forward`; `keep` makes a row outlive that.

Bits: a row's results must not depend on the other rows, on how its tokens were cut into chunks, on sharing, or on the
number of threads (docs/architecture.md, "Random numbers and invariance").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NewType, Protocol

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]
Float32s = npt.NDArray[np.float32]

Hidden = NewType("Hidden", object)
LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]

PARTITION = 256
"""Attention works on fixed partitions of this many absolute positions, merged in ascending order."""


@dataclass(slots=True)
class ForwardBatch:
    """One step's tokens. R rows (sequences), T tokens; the tokens of row r are query_start[r] .. query_start[r + 1].

    For row r with L = seq_lens[r] and q = its query length, its tokens stand at positions L - q .. L - 1, and their K
    and V go to cache slot block_tables[r, p // block_size] * block_size + p % block_size for position p.
    """

    token_ids: Int32s  # [T]
    positions: Int32s  # [T]
    query_start: Int32s  # [R + 1]
    seq_lens: Int32s  # [R], context length including this step's tokens
    block_tables: Int32s  # [R, max_blocks], entries past ceil(L / block_size) are undefined
    hidden_rows: Int32s  # [H], token indices (0..T) whose final hidden state is needed, ascending
    shared_rows: Int32s  # [G, 2], rows first .. first + count of one sharing set; consecutive, disjoint, count >= 2
    shared_blocks: Int32s  # [G], leading full blocks that all rows of the set have in common
    # Sharing is a hint about the same blocks: a backend may ignore it, and the result has the same bits.


@dataclass(slots=True)
class Ragged:
    """Lists of different lengths, flat: list i is values[offsets[i] : offsets[i + 1]]."""

    offsets: Int32s  # [S + 1]
    token_ids: Int32s  # [offsets[-1]]
    values: Float32s | None = None  # beside token_ids, where the list carries numbers


@dataclass(slots=True)
class SamplingBatch:
    """S draws. Draw s is taken from the logits of hidden row rows[s]; several draws may name one row (a fork).

    Order of operations on a draw's logits (fp32), as upstream documents it: allowed mask, banned ids, logit bias,
    logits processors, repetition penalty, frequency and presence penalty; greedy takes the arg max here (lowest id
    wins ties); then temperature, min-p, top-k, top-p, and the draw. Each optional field is None when no draw of the
    batch uses it, so that the common batch pays for nothing.

    The draw: weight_v = exp(logit_v - max) for the ids that remain, u = Philox4x32-10(key = seed, counter = position),
    top 24 bits of its first word / 2**24; the token is the first id in vocabulary order whose cumulative fp32 weight,
    summed in blocks of 1,024 in order, exceeds u * total.
    """

    rows: Int32s  # [S], index into the forward's hidden_rows (or into the rows given to `keep`)
    temperature: Float32s  # [S], 0 is greedy
    top_k: Int32s  # [S], 0 is off
    top_p: Float32s  # [S], 1 is off
    min_p: Float32s  # [S], 0 is off
    seeds: UInt64s  # [S], Philox key
    positions: Int64s  # [S], Philox counter: index of this token in the child's output
    num_logprobs: Int32s  # [S], -1 none, 0 only the drawn token, k that many besides it, vocab_size all
    allowed: npt.NDArray[np.uint32] | None = None  # [S, ceil(V / 32)], bit v % 32 of word v // 32
    banned: Ragged | None = None  # ids whose logit becomes -inf
    bias: Ragged | None = None  # ids with the number to add
    penalties: Float32s | None = None  # [S, 3]: repetition (1 off), frequency (0 off), presence (0 off)
    output_tokens: Ragged | None = None  # ids generated so far, for the penalties (with repeats)
    prompt_tokens: Ragged | None = None  # ids of the prompt, for the repetition penalty
    processors: dict[int, Callable[[Float32s], Float32s]] = field(default_factory=dict)  # draw -> logits to logits
    logprobs_mode: LogprobsMode = "raw_logprobs"

    @property
    def size(self) -> int:
        return len(self.rows)


@dataclass(slots=True)
class LogprobColumns:
    """Log-probabilities of E entries, flat. Entry e is token_ids[offsets[e] : offsets[e + 1]]: the entry's own token
    first, then the most likely ones in order (ranks 1, 2, …; the own token is repeated there if it is among them).
    An entry that asked for none is empty."""

    offsets: Int32s  # [E + 1]
    token_ids: Int32s  # [offsets[-1]]
    logprobs: Float32s  # [offsets[-1]]
    ranks: Int32s  # [E], rank of the own token (1 is the most likely), 0 for an empty entry


@dataclass(slots=True)
class Sampled:
    token_ids: Int32s  # [S]
    logprobs: LogprobColumns | None  # S entries; None when no draw asked
    errors: dict[int, str] = field(default_factory=dict)  # draw -> what its logits processor raised (token is invalid)


@dataclass(slots=True)
class WeightTensor:
    """One weight as the checkpoint has it, lazily: `data` may be a view of a mapped file, and quantized formats are
    decoded only when asked for. numpy has no bfloat16: bf16 is its bits as uint16."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # "float32", "float16", "bfloat16", or a GGUF type such as "Q4_K"
    read: Callable[[], Float32s]  # decoded to fp32, row-major, a fresh or read-only array
    bf16_bits: Callable[[], npt.NDArray[np.uint16]] | None = None  # a view without conversion, where there is one
    read_rows: Callable[[int, int], Float32s] | None = None  # rows start .. stop of `read()`, decoding no others
    raw: Callable[[], npt.NDArray[np.uint8]] | None = None  # GGUF blocks as they are, [rows, bytes]


class Backend(Protocol):
    """Runs one `DecoderSpec` on one device. See the module's docstring for the order of the calls."""

    name: str

    def load_weights(self, weights: Iterable[WeightTensor]) -> None:
        """Take canonical parameters (`DecoderSpec.parameters`). The first call must fill all of them; a later one may
        replace any subset. Raises `WeightError` naming what is missing, unknown, or of another shape."""

    def init_cache(self, num_blocks: int, block_size: int) -> None:
        """Allocate (lazily where the device allows) K and V for `num_blocks` blocks in all layers; again after
        `drop_cache`. Block ids run from 0 to num_blocks - 1."""

    def drop_cache(self) -> None: ...

    def copy_blocks(self, pairs: Int32s) -> None:
        """Copy whole blocks, pairs [N, 2] of (source, target), before the forward pass. No target is a source."""

    def forward(self, batch: ForwardBatch) -> Hidden: ...

    def keep(self, hidden: Hidden, rows: Int32s) -> Hidden:
        """A copy of some rows that outlives the next `forward`; its row i is rows[i]."""

    def sample(self, hidden: Hidden, batch: SamplingBatch) -> Sampled:
        """Draw. The number of draws is unbounded (n may be 10,000 from one row): work in tiles of rows."""

    def token_logprobs(
        self, hidden: Hidden, rows: Int32s, targets: Int32s, num_logprobs: int, mode: LogprobsMode
    ) -> LogprobColumns:
        """Log-probability of targets[i] under the logits of row rows[i], for prompt logprobs."""

    def close(self) -> None: ...


BackendFactory = Callable[..., Backend]
AnyArray = npt.NDArray[Any]
