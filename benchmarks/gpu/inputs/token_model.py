"""A small random model, and how far answers are from what transformers would choose.

Greedy tokens of two correct implementations differ where two logits are nearly equal, so equality is the wrong test.
An answer is judged by teacher forcing: transformers computes the logits of prompt and answer in float32, in one forward
pass, and each token of the answer falls short of the most likely one by some share of that one's logit. The share that
rounding explains is measured: it is the difference between float32 and what transformers itself computes in the
engine's dtype, with two implementations of attention.

The rows of the LM head have norms of a log-normal distribution. With equal ones the best two logits of random weights
would lie so close together that bfloat16 could not tell them apart in a quarter of all positions.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

__all__ = ["Judge", "Judgement", "Kind", "make_prompts", "save_model"]

Kind = Literal["dense", "experts", "recurrent"]

EXPERTS: dict[str, Any] = {  # of the second layer; more of them would differ by rounding more than a tolerance can tell
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
}
RECURRENT: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_experts": 0,
    "partial_rotary_factor": 1.0,  # else a wrong position would change too little
}


@dataclass(frozen=True)
class _Model:
    """A kind of model, and how its random weights differ from four times what transformers draws.

    Attributes:
        factors: of the weights whose names contain a text.
        norm: mean of the norms' weights.
    """

    config: type[PretrainedConfig]
    model: type[PreTrainedModel]
    options: dict[str, Any] = field(default_factory=dict)
    factors: dict[str, float] = field(default_factory=dict)
    norm: float = 1.0


MODELS: dict[Kind, _Model] = {
    "dense": _Model(Qwen3Config, Qwen3ForCausalLM),
    # A router's logits lie far apart, so that experts that rounding may exchange have small weights.
    "experts": _Model(Qwen3MoeConfig, Qwen3MoeForCausalLM, EXPERTS, {"mlp.gate.": 16}),
    # Attention counts as much as the recurrent layer, whose errors it would else amplify.
    "recurrent": _Model(
        Qwen3NextConfig, Qwen3NextForCausalLM, RECURRENT, {"linear_attn.out_proj": 2, "self_attn.o_proj": 8}, norm=0.5
    ),
}
MAX_TOKENS = 24
VOCAB_SIZE = 1024
ATTENTION = ("eager", "sdpa")  # transformers' implementations
LEAST_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}  # shares of the largest logit


def save_model(directory: Path, kind: Kind = "dense") -> None:
    """Write a model of Qwen3, Qwen3-MoE or Qwen3-Next with bfloat16 weights whose attention is not flat."""
    kind_of_model = MODELS[kind]
    config = kind_of_model.config(
        **kind_of_model.options,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        rope_theta=1e6,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        architectures=[kind_of_model.model.__name__],
    )
    torch.manual_seed(0)
    model = kind_of_model.model(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.uniform_(-3.0, 0.0)  # a state remembers many tokens
            elif "norm" in name:
                weight.copy_(kind_of_model.norm + 0.1 * torch.randn_like(weight))
            else:
                weight.mul_(next((factor for text, factor in kind_of_model.factors.items() if text in name), 4))
        model.lm_head.weight.mul_(torch.randn(VOCAB_SIZE, 1).exp())
    model.to(torch.bfloat16).save_pretrained(directory)


def make_prompts(count: int, longest: int) -> list[list[int]]:
    """Return prompts of 1 to ``longest`` tokens; half of them share a prefix."""
    rng = random.Random(0)

    def ids(length: int) -> list[int]:
        return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]

    shared = ids(longest // 2)
    prompts = [ids(rng.randint(1, longest)) for _ in range(count // 2)]
    return prompts + [shared + ids(rng.randint(0, longest // 3)) for _ in range(count - len(prompts))]


@dataclass(frozen=True)
class Judgement:
    """What teacher forcing says about a list of answers. All shares are of the largest logit of a position.

    Attributes:
        positions: tokens that were judged.
        shortfall: largest share by which a token falls short of the most likely one.
        above: share of the positions whose token falls short by more than the tolerance.
        not_first: share of the positions whose token is not the most likely one.
        tolerance: what rounding can explain: four times the measured difference, root mean square.
        runner_up_within: share of the positions where the second most likely token would be tolerated too.
    """

    positions: int
    shortfall: float
    above: float
    not_first: float
    tolerance: float
    runner_up_within: float


class Judge:
    """transformers' model in float32, and in the engine's dtype to measure rounding."""

    def __init__(self, directory: Path, dtype: str, device: torch.device) -> None:
        def load(dtype: torch.dtype, attention: str) -> PreTrainedModel:
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation=attention)
            return model.to(device).eval()

        self._least = LEAST_TOLERANCE[dtype]
        self._device = device
        self._judged: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[torch.Tensor, ...]] = {}
        self._exact = load(torch.float32, ATTENTION[0])
        self._rounded = [load(getattr(torch, dtype), attention) for attention in ATTENTION]

    def judge(self, prompts: list[list[int]], answers: list[list[int]]) -> Judgement:
        """Judge each answer to each prompt."""
        pairs = zip(prompts, answers, strict=True)
        judged = [self._judge_one(tuple(prompt), tuple(answer)) for prompt, answer in pairs]
        shortfall, runner_up, noise = (torch.cat(parts) for parts in zip(*judged, strict=True))
        tolerance = max(self._least, 4 * float(noise.square().mean().sqrt()))
        return Judgement(
            positions=len(shortfall),
            shortfall=float(shortfall.max()),
            above=_share(~(shortfall <= tolerance)),
            not_first=_share(shortfall > 0),
            tolerance=tolerance,
            runner_up_within=_share(runner_up <= tolerance),
        )

    @torch.inference_mode()
    def _judge_one(self, prompt: tuple[int, ...], answer: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        """Return by how much the tokens and the second-best ones fall short, and the differences by rounding."""
        if (known := self._judged.get((prompt, answer))) is not None:
            return known
        exact = self._logits(self._exact, prompt, answer)
        largest, best_two = exact.max(dim=-1).values, exact.topk(2, dim=-1).indices
        chosen = exact.gather(1, torch.tensor(answer, device=self._device)[:, None])[:, 0]
        gap = _gap(exact, best_two)
        noise = [_gap(self._logits(model, prompt, answer), best_two) - gap for model in self._rounded]
        shares = tuple(item / largest.abs() for item in (largest - chosen, gap, torch.stack(noise)))
        result = (shares[0], shares[1], shares[2].flatten())
        self._judged[prompt, answer] = result
        return result

    def _logits(self, model: PreTrainedModel, prompt: tuple[int, ...], answer: tuple[int, ...]) -> torch.Tensor:
        """Return float32 logits [len(answer), vocab_size] of the positions that choose the answer's tokens."""
        ids = torch.tensor([[*prompt, *answer[:-1]]], device=self._device)
        logits: torch.Tensor = model(ids, use_cache=False, logits_to_keep=len(answer)).logits[0]
        return logits.float()


def _gap(logits: torch.Tensor, best_two: torch.Tensor) -> torch.Tensor:
    first, second = logits.gather(1, best_two).unbind(1)
    return first - second


def _share(positions: torch.Tensor) -> float:
    return float(positions.float().mean())
