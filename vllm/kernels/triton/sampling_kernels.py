"""The kernels of the sampler. `v1/sample/reference.py` defines every step and its order of additions; its step numbers
stand in the docstrings here. Sums are either of integers, or in the reference's order, so the bits are the same.

Arrays: L [rows, V] logits; `rows` maps a distribution d (one set of settings on one row) to its row; W [D, padded V]
are its weights, where a removed id has -1; sums [D, blocks of 1,024].
"""

import triton
import triton.language as tl

BLOCK_IDS = tl.constexpr(1024)
OK, IS_NAN, IS_NONE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def ordered(x):
    """fp32 (no NaN) to int64 in 0 .. 2**32 - 1 in the same order; 0 and -0 are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 2147483648


@triton.jit
def row_stats(l_ptr, rows_ptr, max_ptr, argmax_ptr, status_ptr, size, BLOCK: tl.constexpr):
    """Step 1: the maximum, the lowest id that has it, and whether anything can be drawn. Program d."""
    d = tl.program_id(0)
    row = l_ptr + tl.load(rows_ptr + d).to(tl.int64) * size
    ids = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    nans = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, size, BLOCK):
        l = tl.load(row + first + ids, mask=first + ids < size, other=float("-inf"))
        nans |= (l != l).to(tl.int32)
        best = tl.maximum(best, tl.where(l != l, float("-inf"), l))
    m = tl.max(best, 0)
    bad = tl.max(nans, 0)
    lowest = tl.full((BLOCK,), 2147483647, tl.int32)
    for first in range(0, size, BLOCK):
        l = tl.load(row + first + ids, mask=first + ids < size, other=float("nan"))
        lowest = tl.minimum(lowest, tl.where(l == m, first + ids, 2147483647))
    tl.store(max_ptr + d, m)
    tl.store(argmax_ptr + d, tl.min(lowest, 0))
    tl.store(status_ptr + d, tl.where(bad > 0, IS_NAN, tl.where(m == float("-inf"), IS_NONE, OK)))


@triton.jit
def finite(l, m):
    """Step 1, when the maximum is +inf: ids that have it count as 0, all others as -inf."""
    return tl.where(m == float("inf"), tl.where(l == float("inf"), 0.0, float("-inf")), l)


@triton.jit
def weigh(l_ptr, rows_ptr, max_ptr, scale_ptr, min_p_ptr, w_ptr, size, padded, BLOCK: tl.constexpr):
    """Steps 2 and 3. Program (d, part of the ids); scale [D] is fp32(log2(e) / temperature)."""
    d = tl.program_id(0)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = tl.load(max_ptr + d)
    row = l_ptr + tl.load(rows_ptr + d).to(tl.int64) * size
    l = finite(tl.load(row + ids, mask=ids < size, other=float("-inf")), m)
    y = (l - tl.where(m == float("inf"), 0.0, m)) * tl.load(scale_ptr + d)
    alive = y >= -126.0
    y = tl.where(alive, y, 0.0)
    n = (y + 12582912.0) - 12582912.0  # to the nearest integer, ties to even: |y| < 2**22
    f = y - n
    w = f * 0.001326472731307149
    w = (w + 0.009671512991189957) * f
    w = (w + 0.05550733581185341) * f
    w = (w + 0.24022242426872253) * f
    w = (w + 0.6931470036506653) * f
    w = w + 1.0
    w = (w.to(tl.int32, bitcast=True) + (n.to(tl.int32) << 23)).to(tl.float32, bitcast=True)
    w = tl.where(alive, w, 0.0)
    min_p = tl.load(min_p_ptr + d)
    w = tl.where(w < tl.maximum(min_p, 0.0), -1.0, w)
    tl.store(w_ptr + d.to(tl.int64) * padded + ids, tl.where(ids < size, w, 0.0), mask=ids < padded)


@triton.jit
def keep_top_k(l_ptr, rows_ptr, max_ptr, top_k_ptr, w_ptr, size, padded, BLOCK: tl.constexpr):
    """Step 4: removes all but the k largest by logit, among equal ones the lowest ids. Program d."""
    d = tl.program_id(0)
    k = tl.load(top_k_ptr + d)
    if (k <= 0) | (k >= size):
        return
    m = tl.load(max_ptr + d)
    row = l_ptr + tl.load(rows_ptr + d).to(tl.int64) * size
    weights = w_ptr + d.to(tl.int64) * padded
    ids = tl.arange(0, BLOCK)
    # The k-th largest key, bit by bit: the greatest number that at least k keys reach.
    threshold = tl.zeros((1,), tl.int64)
    for i in range(32):
        candidate = threshold + (tl.full((1,), 1, tl.int64) << (31 - i))
        count = tl.zeros((1,), tl.int32)
        for first in range(0, size, BLOCK):
            live = first + ids < size
            l = finite(tl.load(row + first + ids, mask=live, other=float("-inf")), m)
            removed = tl.load(weights + first + ids, mask=live, other=-1.0) < 0.0
            key = ordered(tl.where(removed, float("-inf"), l))
            count += tl.sum((live & (key >= candidate)).to(tl.int32), 0)
        threshold = tl.where(count >= k, candidate, threshold)
    if tl.sum((threshold <= 8388607).to(tl.int32), 0) > 0:  # the key of -inf: fewer than k remain
        return
    above = tl.zeros((1,), tl.int32)
    for first in range(0, size, BLOCK):
        live = first + ids < size
        l = finite(tl.load(row + first + ids, mask=live, other=float("-inf")), m)
        removed = tl.load(weights + first + ids, mask=live, other=-1.0) < 0.0
        above += tl.sum((live & (ordered(tl.where(removed, float("-inf"), l)) > threshold)).to(tl.int32), 0)
    left = k - above  # of those at the threshold
    for first in range(0, size, BLOCK):
        live = first + ids < size
        l = finite(tl.load(row + first + ids, mask=live, other=float("-inf")), m)
        w = tl.load(weights + first + ids, mask=live, other=-1.0)
        key = ordered(tl.where(w < 0.0, float("-inf"), l))
        level = (live & (key == threshold)).to(tl.int32)
        kept = (key > threshold) | ((level > 0) & (tl.cumsum(level, 0) <= left))
        tl.store(weights + first + ids, tl.where(kept, w, -1.0), mask=live)
        left -= tl.sum(level, 0)


@triton.jit
def _mass(w):
    """q of step 5."""
    return (tl.maximum(w, 0.0).to(tl.float64) * 17592186044416.0).to(tl.int64)


@triton.jit
def keep_top_p(top_p_ptr, w_ptr, size, padded, BLOCK: tl.constexpr):
    """Step 5: removes all but the smallest set whose mass reaches p. Program d."""
    d = tl.program_id(0)
    top_p = tl.load(top_p_ptr + d)
    if top_p >= 1.0:
        return
    weights = w_ptr + d.to(tl.int64) * padded
    ids = tl.arange(0, BLOCK)
    total = tl.zeros((1,), tl.int64)
    for first in range(0, size, BLOCK):
        total += tl.sum(_mass(tl.load(weights + first + ids, mask=first + ids < size, other=0.0)), 0)
    need = tl.maximum((top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
    # The greatest weight (its bits; weights are in 0 .. 1) that the sum of all from it up reaches `need`.
    threshold = tl.zeros((1,), tl.int32)
    for i in range(31):
        candidate = threshold + (tl.full((1,), 1, tl.int32) << (30 - i))
        mass = tl.zeros((1,), tl.int64)
        for first in range(0, size, BLOCK):
            w = tl.maximum(tl.load(weights + first + ids, mask=first + ids < size, other=0.0), 0.0)
            mass += tl.sum(tl.where(w.to(tl.int32, bitcast=True) >= candidate, _mass(w), 0), 0)
        threshold = tl.where(mass >= need, candidate, threshold)
    above = tl.zeros((1,), tl.int64)
    for first in range(0, size, BLOCK):
        w = tl.maximum(tl.load(weights + first + ids, mask=first + ids < size, other=0.0), 0.0)
        above += tl.sum(tl.where(w.to(tl.int32, bitcast=True) > threshold, _mass(w), 0), 0)
    each = tl.maximum(_mass(threshold.to(tl.float32, bitcast=True)), 1)
    left = ((need - above + each - 1) // each).to(tl.int32)
    for first in range(0, size, BLOCK):
        live = first + ids < size
        w = tl.load(weights + first + ids, mask=live, other=-1.0)
        bits = tl.maximum(w, 0.0).to(tl.int32, bitcast=True)
        level = (live & (w >= 0.0) & (bits == threshold)).to(tl.int32)
        kept = (bits > threshold) | ((level > 0) & (tl.cumsum(level, 0) <= left))
        tl.store(weights + first + ids, tl.where(kept, w, -1.0), mask=live)
        left -= tl.sum(level, 0)


@triton.jit
def sum_blocks(w_ptr, sums_ptr, padded, blocks, BLOCKS: tl.constexpr):
    """Step 6, sums of blocks: 16 lanes over 64 numbers in order, and a fold. Program (d, some blocks)."""
    d = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    live = (block < blocks)[:, None]
    places = w_ptr + d * padded + block[:, None] * BLOCK_IDS + tl.arange(0, 16)[None, :]
    lanes = tl.maximum(tl.load(places, mask=live, other=0.0), 0.0)
    for i in range(1, 64):
        lanes += tl.maximum(tl.load(places + 16 * i, mask=live, other=0.0), 0.0)
    eight = tl.sum(tl.reshape(lanes, (BLOCKS, 2, 8)), 1)  # two terms: no order to choose
    four = tl.sum(tl.reshape(eight, (BLOCKS, 2, 4)), 1)
    two = tl.sum(tl.reshape(four, (BLOCKS, 2, 2)), 1)
    tl.store(sums_ptr + d * blocks + block, tl.sum(two, 1), mask=block < blocks)


@triton.jit
def accumulate(sums_ptr, count, blocks, LANES: tl.constexpr):
    """Step 6, c[b]: running sums in order, in place; a distribution per lane."""
    d = tl.program_id(0) * LANES + tl.arange(0, LANES)
    live = d < count
    places = sums_ptr + d.to(tl.int64) * blocks
    total = tl.zeros((LANES,), tl.float32)
    for block in range(blocks):
        total += tl.load(places + block, mask=live, other=0.0)
        tl.store(places + block, total, mask=live)


@triton.jit
def search(
    w_ptr, sums_ptr, argmax_ptr, greedy_ptr, draws_ptr, seeds_ptr, positions_ptr, tokens_ptr,
    count, span, padded, blocks, LANES: tl.constexpr,
):  # fmt: skip
    """Step 6, the draw; a draw per lane. draws [S] names each one's distribution; span = min(V, 1024)."""
    s = tl.program_id(0) * LANES + tl.arange(0, LANES)
    live = s < count
    d = tl.load(draws_ptr + s, mask=live, other=0).to(tl.int64)
    position = tl.load(positions_ptr + s, mask=live, other=0)
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    seed = tl.load(seeds_ptr + s, mask=live, other=0).to(tl.uint64, bitcast=True)
    nothing = tl.zeros((LANES,), tl.uint32)
    word, _, _, _ = tl.philox(seed, low, high, nothing, nothing, 10)
    u = (word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
    sums = sums_ptr + d * blocks
    target = u * tl.load(sums + blocks - 1, mask=live, other=1.0)
    block = tl.zeros((LANES,), tl.int32)
    for b in range(blocks):
        block += (tl.load(sums + b, mask=live, other=0.0) <= target).to(tl.int32)
    block = tl.minimum(block, blocks - 1)  # always so where something can be drawn
    target -= tl.where(block > 0, tl.load(sums + block - 1, mask=live & (block > 0), other=0.0), 0.0)
    weights = w_ptr + d * padded + block.to(tl.int64) * BLOCK_IDS
    running = tl.zeros((LANES,), tl.float32)
    found = tl.full((LANES,), -1, tl.int32)
    last = tl.zeros((LANES,), tl.int32)
    for i in range(span):
        w = tl.maximum(tl.load(weights + i, mask=live, other=0.0), 0.0)
        running += w
        found = tl.where((found < 0) & (running > target), i, found)
        last = tl.where(w > 0.0, i, last)
    token = block * BLOCK_IDS + tl.where(found < 0, last, found)
    greedy = tl.load(greedy_ptr + d, mask=live, other=0) != 0
    token = tl.where(greedy, tl.load(argmax_ptr + d, mask=live, other=0), token)
    tl.store(tokens_ptr + s, token, mask=live)


@triton.jit
def rank(values_ptr, rows_ptr, tokens_ptr, own_ptr, ranks_ptr, size, BLOCK: tl.constexpr):
    """Step 7: the token's value, and 1 + the number of ids with a greater one. Program: an entry."""
    s = tl.program_id(0)
    row = values_ptr + tl.load(rows_ptr + s).to(tl.int64) * size
    own = tl.load(row + tl.load(tokens_ptr + s))
    ids = tl.arange(0, BLOCK)
    greater = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, size, BLOCK):
        greater += (tl.load(row + first + ids, mask=first + ids < size, other=float("-inf")) > own).to(tl.int32)
    tl.store(own_ptr + s, own)
    tl.store(ranks_ptr + s, 1 + tl.sum(greater, 0))


@triton.jit
def edit_mask(l_ptr, allowed_ptr, size, words, BLOCK: tl.constexpr):
    """Step 0: ids outside the allowed mask [D, words] become -inf. Program (d, part of the ids)."""
    d = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = ids < size
    word = tl.load(allowed_ptr + d * words + ids // 32, mask=live, other=0)
    refused = live & (((word >> (ids % 32)) & 1) == 0)
    tl.store(l_ptr + d * size + ids, tl.full((BLOCK,), float("-inf"), tl.float32), mask=refused)


@triton.jit
def edit_banned(l_ptr, offsets_ptr, ids_ptr, size, BLOCK: tl.constexpr):
    """Step 0: banned ids become -inf. Program d."""
    d = tl.program_id(0).to(tl.int64)
    begin = tl.load(offsets_ptr + d)
    end = tl.load(offsets_ptr + d + 1)
    for first in range(begin, end, BLOCK):
        i = first + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + i, mask=i < end, other=0)
        tl.store(l_ptr + d * size + ids, tl.full((BLOCK,), float("-inf"), tl.float32), mask=i < end)


@triton.jit
def edit_bias(l_ptr, offsets_ptr, ids_ptr, values_ptr, size):
    """Step 0: l[id] += bias in list order; an id may come twice. Program d, one warp."""
    d = tl.program_id(0).to(tl.int64)
    begin = tl.load(offsets_ptr + d)
    end = tl.load(offsets_ptr + d + 1)
    for i in range(begin, end):
        place = l_ptr + d * size + tl.load(ids_ptr + i)
        tl.store(place, tl.load(place) + tl.load(values_ptr + i))
        tl.debug_barrier()


@triton.jit
def count_ids(counts_ptr, offsets_ptr, ids_ptr, size, BLOCK: tl.constexpr):
    """counts[d, id] += 1 for each id of list d. Program d."""
    d = tl.program_id(0).to(tl.int64)
    begin = tl.load(offsets_ptr + d)
    end = tl.load(offsets_ptr + d + 1)
    for first in range(begin, end, BLOCK):
        i = first + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + i, mask=i < end, other=0)
        tl.atomic_add(counts_ptr + d * size + ids, tl.full((BLOCK,), 1, tl.int32), mask=i < end)


@triton.jit
def penalize(l_ptr, penalties_ptr, prompt_ptr, output_ptr, size, BLOCK: tl.constexpr):
    """Step 0: repetition, frequency, presence, from counts [D, V]. Program (d, part of the ids)."""
    d = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = ids < size
    repetition = tl.load(penalties_ptr + 3 * d)
    frequency = tl.load(penalties_ptr + 3 * d + 1)
    presence = tl.load(penalties_ptr + 3 * d + 2)
    place = l_ptr + d * size + ids
    l = tl.load(place, mask=live, other=0.0)
    prompt = tl.load(prompt_ptr + d * size + ids, mask=live, other=0)
    output = tl.load(output_ptr + d * size + ids, mask=live, other=0)
    divided = tl.math.div_rn(l, repetition + tl.zeros((BLOCK,), tl.float32))
    repeated = tl.where(l > 0.0, divided, l * repetition)
    if repetition != 1.0:
        l = tl.where((prompt > 0) | (output > 0), repeated, l)
    if frequency != 0.0:
        l = tl.where(output > 0, l - frequency * output.to(tl.float32), l)
    if presence != 0.0:
        l = tl.where(output > 0, l - presence, l)
    tl.store(place, l, mask=live)
