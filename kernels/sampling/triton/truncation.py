"""The Triton kernels of a draw from the tokens that top-k, top-p and min-p keep. They sort nothing.

group_maxima_kernel     logits [vocab_size] of a row -> the largest of each group of tokens; for top-p, which without
                        top-k is a share of the weight of all tokens, also the weight of each part
truncated_draw_kernel   the maxima give a bound below which no token is kept; the tokens of the groups that reach it are
                        read once more, and the last one that is kept is found by bisection

A score, (logit - the row's largest) / temperature, is at most 0. Here it is a key in the order of the scores: kept are
the tokens whose key is above a pivot, and those of the smallest ids whose key equals it.
"""

# ruff: noqa: N803 - Triton's users write compile-time constants in capitals

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sampling.triton.kernels import priority, row_of, store_token
from kernels.sampling.triton.math import from_ordered, is_finite_key, noisy_logits, ordered, scores_of, weights_of

__all__ = ["group_maxima_kernel", "truncated_draw_kernel"]

_NO_KEY = tl.constexpr(-0x80000000)  # below every key
_LOWEST_KEY = tl.constexpr(-0x7F800001)  # of -inf
_NO_PRIORITY = tl.constexpr(-0x8000000000000000)
_NO_LIMIT = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit
def group_maxima_kernel(
    maxima,  # int32 [num_rows, num_groups]: keys
    parts,  # int64 [num_rows, 2, num_programs(1)]: the key of each part's largest logit; the weight relative to this
    logits,
    indices,  # int64 [num_rows], or None: all rows
    temperatures,  # float32 [num_rows]
    top_k,  # int64 [num_rows]; vocab_size: off
    top_p,  # float32 [num_rows]; inf: off
    vocab_size,
    stride,
    num_groups,
    GROUP: tl.constexpr,  # tokens of a group
    GROUPS: tl.constexpr,  # of a program
):
    """Find the largest logit of each group; a NaN counts as +inf, with which no token can be chosen either."""
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(logits + row_of(indices) * stride + token, mask=token < vocab_size, other=-float("inf"))
    program = tl.program_id(0).to(tl.int64)
    largest = tl.max(tl.where(x != x, float("inf"), x), axis=1)
    tl.store(maxima + program * num_groups + group, ordered(largest), mask=group < num_groups)
    if (tl.load(top_k + program) >= vocab_size) & (tl.load(top_p + program) < 1.0):
        # No difference of infinities: a row with +inf or a NaN gets no token, whatever is written here.
        x = tl.where((x > -float("inf")) & (x < float("inf")), x, -float("inf"))
        highest = tl.max(largest, axis=0)
        finite = tl.where((highest > -float("inf")) & (highest < float("inf")), highest, 0.0)
        scores = tl.minimum(scores_of(x, finite, tl.load(temperatures + program)), 0.0)
        to = parts + (program * 2 * tl.num_programs(1) + tl.program_id(1))
        tl.store(to, ordered(highest).to(tl.int64))
        tl.store(to + tl.num_programs(1), tl.sum(tl.sum(weights_of(scores), axis=1), axis=0))


@triton.jit
def _highest_in_tile(keys, amounts, target):
    """Return the highest key from which on the amounts sum to at least ``target``; the lowest one if no sum does."""
    low = tl.max(keys, axis=0) * 0 + _LOWEST_KEY
    high = low * 0 + 1
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        reaches = tl.sum(tl.where(keys >= middle, amounts, 0), axis=0) >= target
        low = tl.where(reaches, middle, low)
        high = tl.where(reaches, high, middle)
    return low


@triton.jit
def _sums_from(first, keys, count, lowest, WEIGHS: tl.constexpr, TILE: tl.constexpr):
    """Return how many of ``count`` keys are at least ``lowest``, and the sum of their weights if asked to.

    The first TILE of them, which mostly are all, have been loaded.
    """
    is_in = (tl.arange(0, TILE) < count) & (first >= lowest)
    numbers = is_in.to(tl.int32)
    weights = tl.zeros([TILE], tl.int64)
    if WEIGHS:
        weights = tl.where(is_in, weights_of(from_ordered(first)), 0)
    for start in range(TILE, count, TILE):
        at = start + tl.arange(0, TILE)
        key = tl.load(keys + at, mask=at < count, other=_LOWEST_KEY)
        is_in = (at < count) & (key >= lowest)
        numbers += is_in.to(tl.int32)
        if WEIGHS:
            weights += tl.where(is_in, weights_of(from_ordered(key)), 0)
    return tl.sum(numbers, axis=0), tl.sum(weights, axis=0)


@triton.jit
def _highest(first, keys, count, low, target, WEIGHS: tl.constexpr, TILE: tl.constexpr):
    """Return a pivot: the key whose token makes the tokens up to it reach ``target``, in number or in weight.

    Or a key below it, if no other token has one from there on. All keys count from ``low`` on.
    """
    high = low * 0 + 1
    num_from_low = count
    num_from_high = count * 0
    while (high - low > 1) & (num_from_low - num_from_high > 1):
        middle = low + ((high - low) >> 1)
        number, weight = _sums_from(first, keys, count, middle, WEIGHS, TILE)
        reaches = (weight if WEIGHS else number) >= target
        low = tl.where(reaches, middle, low)
        high = tl.where(reaches, high, middle)
        num_from_low = tl.where(reaches, number, num_from_low)
        num_from_high = tl.where(reaches, num_from_high, number)
    return low


@triton.jit
def _total_weight(parts, num_parts, largest, temperature, PARTS_PADDED: tl.constexpr):
    """Return the sum of the weights of all tokens of a row."""
    part = tl.arange(0, PARTS_PADDED)
    key = tl.load(parts + part, mask=part < num_parts, other=_LOWEST_KEY).to(tl.int32)
    within = tl.load(parts + num_parts + part, mask=part < num_parts, other=0)
    weights = weights_of(scores_of(from_ordered(key), largest, temperature))
    products = within.to(tl.float64) * weights.to(tl.float64) * 5.820766091346741e-11  # 2^-34
    return tl.sum(products.to(tl.int64), axis=0)


@triton.jit
def _share(total, top_p):
    """Return the smallest whole number of units that is at least ``top_p`` of the total."""
    exact = total.to(tl.float64) * top_p.to(tl.float64)
    whole = exact.to(tl.int64)
    return whole + (whole.to(tl.float64) < exact).to(tl.int64)


@triton.jit
def _collect(
    keys,
    ids,
    groups,
    num_groups,
    bound,
    source,
    largest,
    temperature,
    vocab_size,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the keys and ids of the tokens of some groups that reach the bound, by id; return how many they are."""
    count = num_groups * 0
    for start in range(0, num_groups * GROUP, TILE):
        at = start + tl.arange(0, TILE)
        is_group = at < num_groups * GROUP
        token = tl.load(groups + at // GROUP, mask=is_group, other=0) * GROUP + at % GROUP
        is_token = is_group & (token < vocab_size)
        x = tl.load(source + token, mask=is_token, other=-float("inf"))
        key = ordered(scores_of(x, largest, temperature))
        is_in = is_token & (key >= bound)
        to = count + tl.cumsum(is_in.to(tl.int32), axis=0) - 1
        tl.store(keys + to, key, mask=is_in)
        tl.store(ids + to, token, mask=is_in)
        count += tl.sum(is_in.to(tl.int32), axis=0)
    return count


@triton.jit
def _draw(
    keys, ids, count, pivot, num_equal, weight_above, enough, floor, source, temperature, noise_keys, TILE: tl.constexpr
):
    """Return the highest priority with noise among the tokens that are kept.

    Of tokens whose key equals the pivot at most ``num_equal`` are kept, while the weight before them is not enough.
    """
    first = tl.load(noise_keys).to(tl.uint32, bitcast=True)
    second = tl.load(noise_keys + 1).to(tl.uint32, bitcast=True)
    weight = weights_of(from_ordered(tl.maximum(pivot, _LOWEST_KEY)))
    best = tl.full([TILE], _NO_PRIORITY, tl.int64)
    num_seen = count * 0
    for start in range(0, count, TILE):
        at = start + tl.arange(0, TILE)
        key = tl.load(keys + at, mask=at < count, other=_NO_KEY)
        token = tl.load(ids + at, mask=at < count, other=0)
        is_equal = (at < count) & (key == pivot)
        rank = num_seen + tl.cumsum(is_equal.to(tl.int32), axis=0) - 1
        num_seen += tl.sum(is_equal.to(tl.int32), axis=0)
        is_kept = is_equal & (rank < num_equal) & (weight_above + rank.to(tl.int64) * weight < enough)
        is_kept = (at < count) & (is_kept | (key > pivot)) & (from_ordered(key) >= floor)
        x = tl.load(source + token, mask=is_kept, other=-float("inf"))
        noisy = noisy_logits(x, temperature, token, first, second)
        best = tl.maximum(best, tl.where(is_kept, priority(noisy, token), _NO_PRIORITY))
    return tl.max(best, axis=0)


@triton.jit
def truncated_draw_kernel(
    tokens,  # int64 [batch_size]; only those of the indices are written
    logits,
    indices,
    temperatures,  # float32 [num_rows]
    noise_keys,  # int32 [num_rows, 2]
    top_k,  # int64 [num_rows]; vocab_size: off
    top_p,  # float32 [num_rows]; inf: off
    floors,  # float32 [num_rows]: the lowest score of min-p; -inf: off
    maxima,  # int32 [num_rows, num_groups]; overwritten
    parts,  # int64 [num_rows, 2, num_parts]
    candidates,  # int32 [num_rows, 2, vocab_size]: scratch memory
    vocab_size,
    stride,
    num_groups,
    num_parts,
    GROUP: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,  # a power of two, at least num_groups
    PARTS_PADDED: tl.constexpr,  # a power of two, at least num_parts
    TILE: tl.constexpr,
):
    """Draw the token of one row."""
    program = tl.program_id(0).to(tl.int64)
    row = row_of(indices)
    source = logits + row * stride
    groups = maxima + program * num_groups
    keys = candidates + program * 2 * vocab_size
    ids = keys + vocab_size
    group = tl.arange(0, GROUPS_PADDED)
    of_logits = tl.load(groups + group, mask=group < num_groups, other=_NO_KEY)
    highest = tl.max(of_logits, axis=0)
    if is_finite_key(highest):
        temperature = tl.load(temperatures + program)
        largest = from_ordered(highest)
        scores = scores_of(from_ordered(tl.maximum(of_logits, _LOWEST_KEY)), largest, temperature)
        of_groups = tl.where(group < num_groups, ordered(scores), _NO_KEY)
        k = tl.load(top_k + program).to(tl.int32)
        p = tl.load(top_p + program)
        floor = tl.load(floors + program)

        # The bound. Top-p is a share of what top-k keeps, so then min-p must not take any of it away.
        bound = highest * 0 + _LOWEST_KEY
        enough = highest.to(tl.int64) * 0 + _NO_LIMIT
        if k < vocab_size:
            if k <= num_groups:
                bound = _highest_in_tile(of_groups, (group < num_groups).to(tl.int32), k)
            if p >= 1.0:
                bound = tl.maximum(bound, ordered(floor))
        else:
            if p < 1.0:
                of_row = parts + program * 2 * num_parts
                enough = _share(_total_weight(of_row, num_parts, largest, temperature, PARTS_PADDED), p)
                bound = _highest_in_tile(of_groups, tl.where(group < num_groups, weights_of(scores), 0), enough)
            bound = tl.maximum(bound, ordered(floor))

        # The tokens from the bound on. Their groups take the place of the maxima.
        is_in = (group < num_groups) & (of_groups >= bound)
        tl.debug_barrier()
        tl.store(groups + tl.cumsum(is_in.to(tl.int32), axis=0) - 1, group, mask=is_in)
        tl.debug_barrier()
        num_in = tl.sum(is_in.to(tl.int32), axis=0)
        count = _collect(keys, ids, groups, num_in, bound, source, largest, temperature, vocab_size, GROUP, TILE)
        tl.debug_barrier()

        # The pivot.
        at = tl.arange(0, TILE)
        first = tl.load(keys + at, mask=at < count, other=_LOWEST_KEY)
        pivot = highest * 0 + _NO_KEY
        num_equal = count
        if k < vocab_size:
            pivot = _highest(first, keys, count, bound, k, False, TILE)
            number, weight = _sums_from(first, keys, count, pivot + 1, True, TILE)
            num_equal = k - number
            if p < 1.0:
                enough = _share(weight + num_equal.to(tl.int64) * weights_of(from_ordered(pivot)), p)
        weight_above = highest.to(tl.int64) * 0
        if p < 1.0:
            before = pivot
            pivot = _highest(first, keys, count, tl.maximum(pivot, bound), enough, True, TILE)
            num_equal = tl.where(pivot == before, num_equal, count)
            number, weight_above = _sums_from(first, keys, count, pivot + 1, True, TILE)
        best = _draw(
            keys,
            ids,
            count,
            pivot,
            num_equal,
            weight_above,
            enough,
            floor,
            source,
            temperature,
            noise_keys + 2 * program,
            TILE,
        )
        store_token(tokens, row, best)
    else:
        tl.store(tokens + row, -1)
