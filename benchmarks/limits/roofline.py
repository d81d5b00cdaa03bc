"""The roofline: the least time that a workload can take with a model of this shape on a machine with these rates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from benchmarks.limits.model_shape import ModelShape
from benchmarks.limits.rates import Rates
from benchmarks.peers.runner import MAX_NUM_BATCHED_TOKENS
from benchmarks.workloads import Workload

__all__ = ["Limit", "Roofline"]


@dataclass(frozen=True)
class Limit:
    """The least time of a workload, in seconds."""

    prefill_s: float  # linears of the prompts and the logits of every prompt's last token
    decode_s: float  # linears of all further tokens
    kv_s: float  # reading keys and values once in each decode step
    output_tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Upper bound of the output tokens per second."""
        return self.output_tokens / (self.prefill_s + self.decode_s + self.kv_s)

    @property
    def linear_tokens_per_s(self) -> float:
        """The upper bound without the time to read keys and values."""
        return self.output_tokens / (self.prefill_s + self.decode_s)

    def to_json(self) -> dict[str, float]:
        """Return the times and both rates."""
        return asdict(self) | {"tokens_per_s": self.tokens_per_s, "linear_tokens_per_s": self.linear_tokens_per_s}


class Roofline:
    """The limit of a model on a machine.

    It counts every weight of the linears, read or multiplied with once a step, and the keys and values of the context,
    read once a decode step. A prefix that all prompts share is computed once, and read once for all of them. Prompts
    are computed first, in steps of ``max_num_batched_tokens``; each later step makes one token for every unfinished
    request.
    It does not count the arithmetic of attention, norms, rotary embedding, activations, sampling and scheduling.

    Args:
        shape: the model's.
        rates: the machine's.
        max_num_batched_tokens: tokens of prompts that one step computes, at most.
    """

    def __init__(self, shape: ModelShape, rates: Rates, max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS) -> None:
        self.shape = shape
        self.rates = rates
        self._chunk = max_num_batched_tokens

    def limit(self, workload: Workload) -> Limit:
        """Return the least time of a workload."""
        decodes = list(_decode_steps(workload))
        parameters = self.shape.layer_parameters + self.shape.head_parameters
        kv_bytes = self.shape.kv_bytes_per_token * sum(context for _, context in decodes)
        return Limit(
            self._prefill_seconds(workload),
            sum(self.rates.linear_seconds(parameters, rows) for rows, _ in decodes),
            kv_bytes / (self.rates.weights_gb_s * 1e9),
            workload.output_tokens,
        )

    def share(self, workload: Workload, output_tokens_per_s: float) -> float:
        """Return a result as a share of the limit."""
        return output_tokens_per_s / self.limit(workload).tokens_per_s

    def _prefill_seconds(self, workload: Workload) -> float:
        num_requests, shared = len(workload.requests), workload.shared_prefix
        tokens = workload.input_tokens - shared * (num_requests - 1)
        whole, rest = divmod(tokens, self._chunk)
        chunks = [self._chunk] * whole + [rest] * (rest > 0)
        layers = sum(self.rates.linear_seconds(self.shape.layer_parameters, rows) for rows in chunks)
        return layers + self.rates.linear_seconds(self.shape.head_parameters, num_requests)


def _decode_steps(workload: Workload) -> Iterator[tuple[int, int]]:
    """Yield the rows of each decode step and the tokens whose KV it reads; the prefill generates the first token."""
    shared = workload.shared_prefix
    for generated in range(1, max(request.out for request in workload.requests)):
        running = [len(request.prompt) - shared + generated for request in workload.requests if request.out > generated]
        yield len(running), shared + sum(running)
