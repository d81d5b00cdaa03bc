"""new_drafter: the drafter that an engine's options ask for."""

from __future__ import annotations

from engine.config import EngineConfig, EngineInfo
from engine.kv.block_manager import BlockManager
from engine.options.speculative_config import SpeculativeConfig
from engine.scheduling.drafting.draft_model import DraftModel
from engine.scheduling.drafting.drafter import Drafter
from engine.scheduling.drafting.ngram_proposer import NgramProposer
from engine.scheduling.drafting.payoff import Payoff
from engine.scheduling.drafting.prediction_proposer import PredictionProposer
from engine.scheduling.drafting.proposer import Proposer
from engine.scheduling.drafting.suffix_proposer import SuffixProposer

__all__ = ["new_drafter"]


def new_drafter(
    config: EngineConfig,
    options: SpeculativeConfig,
    info: EngineInfo,
    block_manager: BlockManager,
    draft_model: DraftModel | None = None,
) -> Drafter:
    """Return the drafter of a scheduler; ``options`` are the config's ``speculative_config``."""
    proposers: dict[str, Proposer] = {"prediction": PredictionProposer()}
    if options.method == "suffix":
        proposers["suffix"] = SuffixProposer(options)
    elif options.method == "ngram":
        proposers["ngram"] = NgramProposer(options.prompt_lookup_min, options.prompt_lookup_max)
    payoff = None if config.max_decode_slowdown is None else Payoff(info.free_tokens)
    return Drafter(
        block_manager, proposers, options.num_speculative_tokens, payoff, draft_model, model_name=options.method
    )
