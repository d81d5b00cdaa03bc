"""Noise and probability weights whose bits are the same on a CPU and on a GPU, so that both choose the same tokens.

The C kernels (noise.h and truncated_draw.c of cpu/csrc/sampling/) and the Triton kernels (triton/math.py) evaluate the
same polynomials with the same roundings; a * b + c is rounded once. This is how torch computes them, slowly, where
neither can run.
"""

from __future__ import annotations

import numpy as np
import torch

__all__ = [
    "TOKENS_OF_PART",
    "UNITS_OF_WEIGHT",
    "gumbel_noise",
    "noisy_logits",
    "scores_of",
    "total_weights",
    "weights_of",
]

TOKENS_OF_PART = 2048  # of adjacent ids, whose weights are summed first

UNITS_OF_WEIGHT = 2.0**34  # of a token as likely as the most likely one: sums over 2^18 tokens are exact in float64

# Of Cephes' logf and expf (Moshier, 1992), highest degree first.
_LOG = (
    *(7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1),
    *(-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
)
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def _fma(a: torch.Tensor | float, b: torch.Tensor, c: torch.Tensor | float) -> torch.Tensor:
    """Return a * b + c of float32, rounded once.

    Through float64, which is wrong in the last bit about once in 2^29 times. Floats count as their nearest float32.
    """
    factor, addend = (x.double() if isinstance(x, torch.Tensor) else float(np.float32(x)) for x in (a, c))
    return (b.double() * factor + addend).float()


def _log(x: torch.Tensor) -> torch.Tensor:
    """Return ln x of normal float32 x > 0, where x = 2^e m with m in [sqrt(1/2), sqrt(2))."""
    bits = x.view(torch.int32)
    exponent = (bits - 0x3F3504F3) >> 23
    m, e = (bits - (exponent << 23)).view(torch.float32) - 1.0, exponent.float()
    z, p = m * m, torch.full_like(m, _LOG[0])
    for coefficient in _LOG[1:]:
        p = _fma(p, m, coefficient)
    rest = _fma(-2.12194440e-4, e, p * m * z) - 0.5 * z
    return _fma(0.693359375, e, m + rest)


def _as_int32(constant: int) -> int:
    return constant - 2**32 if constant >= 2**31 else constant


def gumbel_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise, float32 [n, tokens], from int32 ``keys`` [n, 2].

    ``token_ids`` is int32, [tokens] or [n, tokens]. Each number comes from MurmurHash3's 32-bit finaliser, keyed
    before and within; products wrap.
    """
    x = token_ids * _as_int32(0x9E3779B1)
    x = x + keys[:, :1]
    x ^= (x >> 16) & 0xFFFF  # the mask makes the shift a logical one
    x *= _as_int32(0x85EBCA6B)
    x += keys[:, 1:]
    x ^= (x >> 13) & 0x7FFFF
    x *= _as_int32(0xC2B2AE35)
    x ^= (x >> 16) & 0xFFFF
    # 23 bits plus a half: exact in float32, and never 0 or 1.
    uniform = ((x >> 9) & 0x7FFFFF).float().add_(0.5).mul_(2.0**-23)
    return -_log(-_log(uniform))


def noisy_logits(
    logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor, token_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """Return float32 ``logits`` plus temperature times noise, whose argmax is a draw (Gumbel, 1954).

    ``token_ids`` and ``keys`` are those of ``gumbel_noise``; without the former the logits are of all tokens.
    """
    if token_ids is None:
        token_ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    return _fma(temperatures, gumbel_noise(keys, token_ids), logits)


def scores_of(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Return logits relative to the row's largest, divided by the temperature: 0 and less, and never -0."""
    return (logits - logits.amax(dim=1, keepdim=True)).div_(temperatures).add_(0.0)


def weights_of(scores: torch.Tensor) -> torch.Tensor:
    """Return e^x of float32 scores x <= 0 as float64, in whole units of 1 / ``UNITS_OF_WEIGHT``, rounded down.

    Their sums are exact, so they do not depend on the order.
    """
    x = scores.clamp(min=-87.3)
    shifted = _fma(1.44269504, x, 12582912.0)  # 1.5 * 2^23 rounds to an integer
    n = shifted - 12582912.0
    r = _fma(2.12194440e-4, n, _fma(-0.693359375, n, x))
    p = torch.full_like(r, _EXP[0])
    for coefficient in _EXP[1:]:
        p = _fma(p, r, coefficient)
    power = (n.nan_to_num().int() + 127 << 23).view(torch.float32)
    exponentials = _fma(p, r * r, r + 1.0) * power
    return exponentials.masked_fill(scores < -87.3, 0.0).double().mul_(UNITS_OF_WEIGHT).floor_()


def total_weights(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Return the sum of the weights of all tokens of each row, float64 [num_rows, 1], of float32 logits.

    The tokens of a part are weighed relative to its largest logit, and parts relative to the row's: so a GPU needs to
    read the logits only once. Therefore the result differs a little from the sum of ``weights_of``, but it is the same
    on all devices. For a row whose largest logit is not finite it has no meaning.
    """
    num_rows, vocab_size = logits.shape
    padding = -vocab_size % TOKENS_OF_PART
    parts = torch.nn.functional.pad(logits, (0, padding), value=-torch.inf).view(num_rows, -1, TOKENS_OF_PART)
    largest = parts.amax(dim=2)
    of_parts = weights_of((largest - largest.amax(dim=1, keepdim=True)) / temperatures + 0.0)
    within = weights_of((parts - largest[:, :, None]) / temperatures[:, :, None] + 0.0).sum(dim=2)
    products = (within * of_parts).div_(UNITS_OF_WEIGHT).floor_()
    return products.masked_fill_(largest == -torch.inf, 0.0).sum(dim=1, keepdim=True)
