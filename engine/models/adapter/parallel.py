"""ParallelPlan: how tensor-parallel ranks divide the modules of a transformers model.

Each model's config has a plan (``base_model_tp_plan``), which gives modules and parameters a style:

    colwise          rows of a weight: a rank computes its own heads or features
    rowwise          columns: each rank's output is one addend, and all_reduce sums them; the bias is added once
    packed_colwise   the same rows of each of two stacked matrices, gates and ups
    moe_tp_experts   experts whose matrices are divided: their outputs are addends

Every rank has the rest whole: embedding, head, routers and norms. Where a norm is over all heads together, the plan
gathers queries and keys, so that every rank would compute and cache all heads. Here each rank keeps its own heads, and
the norm divides by the root mean square over all ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine.errors import ConfigError
from engine.models.tensor_parallel import TensorParallel

__all__ = ["ParallelPlan"]

_ROWS = frozenset({"colwise", "colwise_gather_output", "colwise_rep"})  # of a weight, by transformers' names
_GATHERED = _ROWS - {"colwise"}  # transformers gathers the outputs, and not only where a norm needs it
_COLUMNS = frozenset({"rowwise", "rowwise_split_input", "rowwise_rep"})
_EXPERTS = "moe_tp_experts"
_WHOLE = frozenset({"embedding_rowwise", "replicate", "replicated_with_grad_allreduce", _EXPERTS})
_KEY_VALUE = frozenset({"k_proj", "v_proj"})
_MAY_BE_GATHERED = _KEY_VALUE | {"q_proj", "lm_head"}  # a fused layer's rows are not those of a rank
_NORMALISED = {"q_norm": "q_proj", "k_norm": "k_proj"}

# For models whose configs have no plan. Experts of GPT-OSS are transposed, and their gates and ups alternate.
_PLANS: dict[str, dict[str, str]] = {
    "GptOssForCausalLM": {
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.k_proj": "colwise",
        "model.layers.*.self_attn.v_proj": "colwise",
        "model.layers.*.self_attn.sinks": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.mlp.experts": _EXPERTS,
        "model.layers.*.mlp.experts.gate_up_proj": "rowwise",
        "model.layers.*.mlp.experts.gate_up_proj_bias": "rowwise",
        "model.layers.*.mlp.experts.down_proj": "second_last",
        "model.layers.*.mlp.experts.down_proj_bias": "once",
    }
}


@dataclass(frozen=True)
class _Cut:
    """A rank's part of a parameter: one of ``count`` equal parts along ``dim``."""

    dim: int
    index: int
    count: int
    num_stacked: int = 1  # matrices that are stacked along dim, each cut in the same way

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a copy of the part, which does not keep the whole in memory."""
        matrices = whole.chunk(self.num_stacked, self.dim)
        return torch.cat([matrix.chunk(self.count, self.dim)[self.index] for matrix in matrices], self.dim)


class ParallelPlan:
    """The division of one model among the ranks of a group.

    Args:
        model: of transformers, on the meta device.
        parallel: this rank and its group.

    Raises:
        ConfigError: if the model has no plan, or its heads or features cannot be divided by the number of ranks.
    """

    def __init__(self, model: Any, parallel: TensorParallel) -> None:
        self._parallel = parallel
        self._cuts: dict[str, _Cut] = {}  # by the parameter's name
        self._once: set[str] = set()  # parameters that are added to a sum: only rank 0 has them
        self._sums: list[str] = []  # modules whose outputs the ranks sum
        self._norms: list[str] = []  # modules that normalise the heads of all ranks together
        if parallel.size > 1:
            self._heads = _heads(model.config, parallel.size)
            self._divide(model, _Styles(_plan_of(model, parallel.size)))

    def _divide(self, model: Any, styles: _Styles) -> None:
        for module_name, module in model.named_modules():
            style = styles.of(module_name)
            if style in _COLUMNS or style == _EXPERTS:
                self._sums.append(module_name)
            for name, parameter in module.named_parameters(module_name, recurse=False):
                self._divide_parameter(name, parameter, styles.of(name) or style)
        for module_name, module in model.named_modules():
            self._divide_norm(model, module_name, module)

    def _divide_parameter(self, name: str, parameter: torch.Tensor, style: str | None) -> None:
        rank, size, last = self._parallel.rank, self._parallel.size, parameter.dim() - 1
        if style == "once" or (style in _COLUMNS and name.endswith(".bias")):
            self._once.add(name)
        elif style in _ROWS and not name.startswith("lm_head."):
            self._cut(name, parameter, self._rows(name.split(".")[-2]))
        elif style == "packed_colwise":
            self._cut(name, parameter, _Cut(max(last - 1, 0), rank, size, num_stacked=2))
        elif style in _COLUMNS or style == "second_last":
            self._cut(name, parameter, _Cut(last if style in _COLUMNS else last - 1, rank, size))

    def _rows(self, module: str) -> _Cut:
        """Return this rank's part of a module's outputs: neighbouring ranks may have the same KV head."""
        rank, size, num_kv_heads = self._parallel.rank, self._parallel.size, self._heads[1]
        if module in _KEY_VALUE and num_kv_heads < size:
            return _Cut(0, rank * num_kv_heads // size, num_kv_heads)
        return _Cut(0, rank, size)

    def _cut(self, name: str, parameter: torch.Tensor, cut: _Cut) -> None:
        width = parameter.shape[cut.dim] // cut.num_stacked
        if width % cut.count:
            raise _uneven(self._parallel.size, f"{width} features of '{name}'")
        self._cuts[name] = cut

    def _divide_norm(self, model: Any, name: str, module: nn.Module) -> None:
        """Divide a norm of all heads together, if its heads are divided."""
        parent, _, kind = name.rpartition(".")
        projection = f"{parent}.{_NORMALISED.get(kind)}"
        weight = getattr(module, "weight", None)
        if f"{projection}.weight" not in self._cuts or weight is None:
            return
        if weight.dim() == 1 and len(weight) == len(model.get_submodule(projection).weight):
            self._cut(f"{name}.weight", weight, self._cuts[f"{projection}.weight"])
            self._norms.append(name)

    @contextmanager
    def applied_while_loading(self) -> Iterator[None]:
        """Let transformers' loader keep only this rank's part of each parameter, one whole parameter at a time."""
        from transformers import core_model_loading  # slow to import

        set_whole = core_model_loading.set_param_for_module

        def set_own(model: Any, name: str, value: torch.Tensor, *others: Any) -> None:
            module, _, attribute = name.rpartition(".")
            if name in self._cuts:
                value = self._cuts[name].of(value)
                expected = nn.Parameter(torch.empty_like(value, device="meta"), requires_grad=False)
                setattr(model.get_submodule(module), attribute, expected)
            elif name in self._once and self._parallel.rank > 0:
                value = torch.zeros_like(value)
            set_whole(model, name, value, *others)

        core_model_loading.set_param_for_module = set_own
        try:
            yield
        finally:
            core_model_loading.set_param_for_module = set_whole

    def connect(self, model: nn.Module) -> None:
        """Let the modules of ``model``, which has this rank's weights, compute with those of the other ranks."""
        for name in self._sums:
            model.get_submodule(name).register_forward_hook(self._sum)
        for name in self._norms:
            model.get_submodule(name).register_forward_hook(self._normalise)

    def _sum(self, _: nn.Module, __: object, output: torch.Tensor) -> torch.Tensor:
        return self._parallel.all_reduce(output.contiguous())

    def _normalise(self, norm: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        """Return the norm of the heads of all ranks, given the ``output`` of this rank's norm of its own heads."""
        eps: Any = getattr(norm, "variance_epsilon", None) or norm.eps
        own = args[0].float().square().mean(-1, keepdim=True)
        everywhere = self._parallel.all_reduce(own.clone()) / self._parallel.size
        return (output.float() * torch.sqrt((own + eps) / (everywhere + eps))).to(output.dtype)


class _Styles:
    """The styles of a plan, whose names have ``*`` for the number of a layer."""

    def __init__(self, plan: Mapping[str, str]) -> None:
        self._patterns = [(re.compile(re.escape(name).replace(r"\*", r"\d+")), style) for name, style in plan.items()]

    def of(self, name: str) -> str | None:
        """Return the style of a module or parameter; None if every rank has it whole."""
        return next((style for pattern, style in self._patterns if pattern.fullmatch(name)), None)


def _plan_of(model: Any, size: int) -> dict[str, str]:
    """Return the styles by name; raise ConfigError if there is no plan, or one with a style that is unknown here."""
    architecture = type(model).__name__
    plan: dict[str, str] = _PLANS.get(architecture) or dict(model.tp_plan)
    known = _ROWS | _COLUMNS | _WHOLE | {"packed_colwise", "second_last", "once"}
    unknown = sorted(
        name
        for name, style in plan.items()
        if style not in known or (style in _GATHERED and name.rpartition(".")[2] not in _MAY_BE_GATHERED)
    )
    if unknown or not any(style in _COLUMNS for style in plan.values()):
        name = unknown[0] if unknown else ""
        why = f"its plan for '{name}' is '{plan[name]}'" if unknown else "transformers has no plan for it"
        raise ConfigError(
            f"is not supported for '{architecture}': {why}", param="tensor_parallel_size", value=size, remedy="set 1"
        )
    return plan


def _heads(config: Any, size: int) -> tuple[int, int]:
    """Return the numbers of heads and of KV heads; raise ConfigError if ``size`` ranks cannot divide them."""
    num_heads = config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    if num_heads % size:
        raise _uneven(size, f"{num_heads} attention heads")
    if num_kv_heads % size and size % num_kv_heads:
        raise _uneven(size, f"{num_kv_heads} KV heads")
    return num_heads, num_kv_heads


def _uneven(size: int, what: str) -> ConfigError:
    return ConfigError(f"tensor_parallel_size={size} does not divide the model's {what}; choose another size")
