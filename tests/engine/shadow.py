"""ShadowRunner: a fake ModelRunner that computes nothing but knows what every KV slot must hold.

It runs with the real engine, scheduler and block manager. Each slot of its cache holds the identity of the whole prefix
that was written there, so a sequence that reads a foreign, stale or unwritten slot fails in the same step. Its tokens
depend on the whole prefix, so one wrong read makes an answer wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from weakref import WeakKeyDictionary, WeakSet

from engine.config import EngineConfig, EngineInfo
from engine.engine import Engine
from engine.kv.events import KVEventBatch
from engine.kv.page_copies import BlockPair, PageCopies
from engine.kv.tiers.host_memory import HostMemory
from engine.observability.engine_metrics import EngineMetrics
from engine.observability.metrics import MetricSink
from engine.outputs import Logprob, TokenLogprobs
from engine.sampling.beam_search import BeamSearch, Hypothesis
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler_output import SampledTokens, SchedulerOutput, StepTimes
from engine.sequence import Sequence, SequenceGroup, SequenceStatus
from engine.worker.runner import ComputedStep
from kernels.attention.window import Window, first_key
from tests.engine.shadow_memory import HostSlots, shadow_host_memory
from tests.engine.shadow_model import VOCAB_SIZE, PrefixIds, candidates, next_token, num_candidates, token_logprob


class ShadowRunner:
    """Checks, step by step, that what a sequence attends to is its own prefix."""

    def __init__(self, info: EngineInfo) -> None:
        self.info = info
        self.block_size = info.block_size
        self.slots: dict[int, int] = {}
        self.host_slots = HostSlots(info.num_host_blocks * info.block_size)
        self.page_maps: list[dict[int, int]] = [{} for _ in info.windows]  # of each window: the page of each block
        self.window_slots: list[dict[int, int]] = [{} for _ in info.windows]
        pages = info.num_host_window_pages or [0] * len(info.windows)
        self.host_window_slots = [HostSlots(count * info.block_size) for count in pages]
        self.states: dict[int, int] = {}  # the prefix that the state in each slot has seen
        self.host_states = HostSlots(info.num_host_slots)
        self.ids = PrefixIds()
        self.num_steps = 0
        self.num_copied: Counter[str] = Counter()
        self.sampled_ids: list[int] = []  # of the last step
        self.on_device: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()  # the same, by sequence
        self.undecided: WeakSet[Sequence] = WeakSet()  # those of which only the host will know the token

    @property
    def host_memory(self) -> HostMemory:
        """The host pools as bytes."""
        return shadow_host_memory(self.info, self.host_slots, self.host_window_slots, self.host_states)

    @property
    def draft_model(self) -> None:
        """None: it drafts nothing."""

    def start(self, output: SchedulerOutput) -> ComputedStep:
        """Do what ``run`` does, and withhold the tokens until the step is finished, as a GPU does."""
        return ComputedStep(self.run(output, StepTimes()))

    def tokens(self, sequence: Sequence) -> list[int]:
        """Return the tokens of a sequence, the one that the host does not know yet included."""
        return [*sequence.token_ids, self.on_device[sequence]] if sequence.num_pending else sequence.token_ids

    def run(self, output: SchedulerOutput, times: StepTimes) -> SampledTokens:
        """Make the step's copies, write its slots, then check every read, as a layer does."""
        self.num_steps += 1
        self._make("block", output.block_copies, self.slots, self.host_slots, self.block_size)
        drafts = output.drafts
        chains = [
            self.ids.chain(sequence.cache_key, self.tokens(sequence) + drafts.get(sequence, []))
            for sequence in output.sequences
        ]
        if self.info.num_slots:
            self._run_states(output, chains)
        for index in range(len(self.info.windows)):
            self._run_window(index, output, chains)
        written: set[int] = set()
        for sequence, count, chain in zip(output.sequences, output.num_new_tokens, chains, strict=True):
            assert count >= 1, "a scheduled sequence has an empty query"
            assert sequence.status is SequenceStatus.RUNNING
            start = sequence.num_computed_tokens
            for position in range(max(start, sequence.num_matched_tokens), start + count):
                slot = self.slot(sequence, position)
                assert slot not in written, "two tokens are written to one slot in one step"
                written.add(slot)
                self.slots[slot] = chain[position]
        for sequence, count, chain in zip(output.sequences, output.num_new_tokens, chains, strict=True):
            for position in range(sequence.num_computed_tokens + count):
                held = self.slots.get(self.slot(sequence, position))
                assert held == chain[position], f"{sequence.request_id} reads foreign KV at {position}"
        sampled = self._sample(output, chains)
        self.sampled_ids = sampled.token_ids.copy()
        self.on_device = WeakKeyDictionary(zip(output.sampling, sampled.token_ids, strict=True))
        self.undecided.clear()
        return sampled

    def check_health(self) -> None:
        """Do nothing: there is no process that could end."""

    def close(self) -> None:
        """Do nothing: nothing was started."""

    def _make(self, kind: str, copies: PageCopies, device: dict[int, int], host: HostSlots, page_size: int) -> None:
        """Make the copies of one pool, in their order."""
        self._copy(f"{kind} out", copies.swap_out, device, host, page_size)
        self._copy(f"{kind} in", copies.swap_in, host, device, page_size)
        self._copy(f"{kind} copied", copies.on_device, device, device, page_size)

    def _copy(
        self,
        name: str,
        pairs: list[BlockPair],
        source: dict[int, int] | HostSlots,
        target: dict[int, int] | HostSlots,
        page_size: int,
    ) -> None:
        assert len({to for _, to in pairs}) == len(pairs), f"{name}: two pages are copied to one"
        read = [(to * page_size + i, source.get(page * page_size + i)) for page, to in pairs for i in range(page_size)]
        for slot, held in read:
            target.pop(slot, None)
            if held is not None:
                target[slot] = held
        self.num_copied[name] += len(pairs)

    def _run_window(self, index: int, output: SchedulerOutput, chains: list[list[int]]) -> None:
        """Do for the pages of a window what ``run`` does for blocks; only what is within reach is read."""
        window, slots, pages = self.info.windows[index][0], self.window_slots[index], self.page_maps[index]
        assert output.sequences or not len(output.window_changes[index][0]), "no rank learns of a page"
        pages |= dict(zip(*(part.tolist() for part in output.window_changes[index]), strict=True))
        self._make("page", output.window_copies[index], slots, self.host_window_slots[index], self.block_size)

        def slot(sequence: Sequence, position: int) -> int:
            page = pages[sequence.block_table[position // self.block_size]]
            assert 0 <= page < self.info.windows[index][1]
            return page * self.block_size + position % self.block_size

        written: set[int] = set()
        for sequence, count, chain in zip(output.sequences, output.num_new_tokens, chains, strict=True):
            start = sequence.num_computed_tokens
            for position in range(max(start, sequence.num_matched_tokens), start + count):
                assert slot(sequence, position) not in written, "two tokens are written to one slot of a window"
                written.add(slot(sequence, position))
                slots[slot(sequence, position)] = chain[position]
        for sequence, count, chain in zip(output.sequences, output.num_new_tokens, chains, strict=True):
            start = sequence.num_computed_tokens
            for position in range(first_key(window, start), start + count):
                held = slots.get(slot(sequence, position))
                assert held == chain[position], f"{sequence.request_id} reads foreign KV of a window at {position}"

    def _run_states(self, output: SchedulerOutput, chains: list[list[int]]) -> None:
        """Make the copies of states, check the state of every sequence, and let it see the step's tokens."""
        self._make("state", output.state_copies, self.states, self.host_states, 1)
        copied = output.state_copies.on_device
        assert all(slot in self.states for _, slot in copied), "a state is copied that was never computed"
        saved = [slot for saves in output.state_saves.values() for _, slot in saves]
        used = [sequence.state_slot for sequence in output.sequences] + saved
        assert len(set(used)) == len(used), "a state is written twice in one step"
        assert set(output.state_saves) <= set(output.sequences), "a state is saved that is not computed"
        for sequence, count, chain in zip(output.sequences, output.num_new_tokens, chains, strict=True):
            start = sequence.num_computed_tokens
            if self.skips_state(sequence):
                continue
            if start:
                held = self.states.get(sequence.state_slot)
                assert held == chain[start - 1], f"{sequence.request_id} continues a foreign state at {start}"
            for num_tokens, slot in output.state_saves.get(sequence, ()):
                assert start < num_tokens <= start + count, "a state is saved outside the step"
                self.states[slot] = chain[num_tokens - 1]
                self.num_copied["saved state"] += 1
            self.states[sequence.state_slot] = chain[start + count - 1]

    def skips_state(self, sequence: Sequence) -> bool:
        """Whether a step leaves the state of a sequence as it is: there was no token to take; see StepPlan."""
        return sequence.num_pending > 0 and sequence in self.undecided

    def _sample(self, output: SchedulerOutput, chains: list[list[int]]) -> SampledTokens:
        sampled = SampledTokens([])
        for position, (sequence, logit_index) in enumerate(zip(output.sampling, output.logit_indices, strict=True)):
            computed = output.sequences[logit_index]
            num_drafted = len(output.drafts.get(computed, ()))
            end = computed.num_computed_tokens + output.num_new_tokens[logit_index] - num_drafted
            assert end == computed.num_tokens == sequence.num_tokens, (
                "a sequence samples before its tokens are computed"
            )
            assert computed is sequence or computed.token_ids == sequence.token_ids, (
                "a fork samples from foreign logits"
            )
            self._check_host_state(sequence)
            prefix = chains[logit_index][end - 1]
            if num_drafted:
                self._sample_after_draft(sequence, chains[logit_index][end:], sampled)
            if sequence.params.beam_width is None:
                sampled.token_ids.append(next_token(prefix, sequence.index))
            else:
                sampled.token_ids.append(-1)
                sampled.beams[position] = candidates(prefix, num_candidates(sequence.params, sequence.stop_token_ids))
        if any(sequence.params.needs_logprobs for sequence in output.sampling):
            sampled.logprobs = [
                {token_id: Logprob(token_logprob(chains[logit_index][item.num_tokens - 1], item.index), 1)}
                if item.params.needs_logprobs
                else None
                for item, logit_index, token_id in zip(
                    output.sampling, output.logit_indices, sampled.token_ids, strict=True
                )
            ]
        sampled.prompt_logprobs = self._prompt_logprobs(output, chains)
        return sampled

    @staticmethod
    def _sample_after_draft(sequence: Sequence, prefixes: list[int], sampled: SampledTokens) -> None:
        """Sample after each draft token, given the prefix that ends with it."""
        after_draft = [next_token(prefix, sequence.index) for prefix in prefixes]
        sampled.after_drafts[sequence] = after_draft
        if sequence.params.needs_logprobs:
            logprobs = [Logprob(token_logprob(prefix, sequence.index), 1) for prefix in prefixes]
            sampled.logprobs_after_drafts[sequence] = [
                {token_id: logprob} for token_id, logprob in zip(after_draft, logprobs, strict=True)
            ]

    @staticmethod
    def _check_host_state(sequence: Sequence) -> None:
        """Assert that the host knows all tokens of a sequence that needs them, and that it can go on."""
        if sequence.num_pending:
            assert not sequence.needs_known_tokens, "a token is chosen by tokens that are not known"
            assert sequence.num_tokens < sequence.max_total_tokens, "a token is sampled after the last one"

    def _prompt_logprobs(
        self, output: SchedulerOutput, chains: list[list[int]]
    ) -> list[tuple[SequenceGroup, list[TokenLogprobs]]]:
        hypotheses = []
        for sequence, count, chain in zip(output.sequences, output.num_new_tokens, chains, strict=True):
            start = sequence.num_computed_tokens
            if known := sequence.group.prompt_logprob_positions(start, start + count):
                logprobs = [{sequence.token_ids[i + 1]: Logprob(token_logprob(chain[i]), 1)} for i in known]
                hypotheses.append((sequence.group, logprobs))
        return hypotheses

    def slot(self, sequence: Sequence, position: int) -> int:
        """Return where the token at ``position`` lives."""
        return sequence.block_table[position // self.block_size] * self.block_size + position % self.block_size

    def answer(self, prompt: list[int], count: int, salt: str = "", index: int = 0) -> list[int]:
        """Return the ``count`` tokens that an undisturbed engine answers."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(next_token(self.ids.chain(salt, tokens)[-1], index))
        return tokens[len(prompt) :]

    def search(
        self, prompt: list[int], params: SamplingParams, max_total_tokens: int, salt: str = ""
    ) -> list[Hypothesis]:
        """Return the hypotheses that an undisturbed beam search finds."""
        assert params.beam_width is not None
        search = BeamSearch(params.beam_width, params.length_penalty, params.early_stopping, len(prompt))
        stops = frozenset(params.stop_token_ids or ())
        beams = [list(prompt)]
        while True:
            continuations = [
                candidates(self.ids.chain(salt, beam)[-1], num_candidates(params, stops)) for beam in beams
            ]
            going_on = search.advance(beams, continuations, stop_token_ids=stops, max_total_tokens=max_total_tokens)
            if search.is_done:
                return search.hypotheses
            beams = [[*beams[beam.parent], beam.token_id] for beam in going_on]


def make_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 512,
    num_host_blocks: int = 0,
    windows: tuple[tuple[Window, int], ...] = (),
    num_host_window_pages: tuple[int, ...] = (),
    num_slots: int = 0,
    snapshot_interval: int = 0,
    num_host_slots: int = 0,
    sink: MetricSink | None = None,
    on_kv_events: Callable[[KVEventBatch], None] | None = None,
    eos_token_ids: tuple[int, ...] = (),
    free_tokens: int | None = None,
    device: str = "cpu",
    **options: object,
) -> tuple[Engine, ShadowRunner]:
    """Return a real engine around a shadow runner. By default no step depends on how long others took."""
    config = EngineConfig.from_options("shadow", {"target_inter_token_ms": None} | dict(options))
    info = EngineInfo(
        model="shadow",
        block_size=block_size,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        dtype="float32",
        device=device,
        attention_backend="none",
        eos_token_ids=eos_token_ids,
        default_sampling={},
        free_tokens=free_tokens,
        num_slots=num_slots,
        num_snapshots=max(num_slots // 3, num_slots - min(config.max_num_seqs, config.tokens_per_step)),
        snapshot_interval=snapshot_interval,
        windows=windows,
        num_host_window_pages=num_host_window_pages,
        num_host_slots=num_host_slots,
    )
    runner = ShadowRunner(info)
    engine = Engine(config, runner, sink, on_kv_events)
    if engine.scheduler.drafter is not None:
        engine.scheduler.drafter.payoff = None
    return engine, runner


def check_integrity(engine: Engine) -> None:
    """Assert the invariants that hold between two steps."""
    scheduler = engine.scheduler
    waiting = [sequence for group in scheduler.waiting for sequence in group.unfinished]
    engine.block_manager.check_integrity(scheduler.running + waiting)
    if (states := engine.block_manager.states) is not None:
        in_flight = {} if engine._in_flight is None else engine._in_flight.output.drafts
        assert states._backups.keys() <= in_flight.keys(), "a state from before a step is left"
    assert scheduler.running == sorted(scheduler.running, key=lambda sequence: sequence.priority_key)
    assert scheduler.waiting == sorted(scheduler.waiting, key=lambda group: group.priority_key, reverse=True)
    assert sum(count for count, _ in scheduler.queues._turns._clients.values()) == len(scheduler.waiting)
    assert len(scheduler.running) <= scheduler.max_num_running
    groups = list(dict.fromkeys(sequence.group for sequence in scheduler.running))
    assert scheduler.queues.num_used_slots == sum(group.num_slots for group in groups) <= scheduler.max_num_running
    for group in groups:
        assert group not in scheduler.waiting, "a request runs and waits at once"
        assert all(sequence in scheduler.running for sequence in group.unfinished), "a request runs in part"
        gives_back = group.is_forked and group.beams is None
        assert group.num_slots == (len(group.unfinished) if gives_back else group.params.num_sequences)
    for group in scheduler.waiting:
        assert len({sequence.status for sequence in group.unfinished}) == 1
        assert group.status in (SequenceStatus.WAITING, SequenceStatus.SWAPPED)
    assert scheduler.queues.num_swapped == sum(group.status is SequenceStatus.SWAPPED for group in scheduler.waiting)
    assert not any(sequence.block_table for sequence in waiting)
    for sequence in scheduler.running:
        filled = max(sequence.num_computed_tokens, sequence.num_matched_tokens)
        held = engine.block_manager.num_blocks_for(filled)
        if engine._overlaps_steps:  # drafts in flight have blocks, and so has a token that is resampled on the host
            has_draft = engine._in_flight is not None and sequence in engine._in_flight.output.drafts
            held = len(sequence.block_table) if has_draft else max(held, min(len(sequence.block_table), held + 1))
        if engine.block_manager.states is not None:  # tokens that a rejected draft has led to are computed again
            held = max(
                held, min(len(sequence.block_table), engine.block_manager.num_blocks_for(sequence.num_tokens - 1))
            )
        assert len(sequence.block_table) == held, "a sequence holds blocks that it does not fill"
        assert sequence.num_computed_tokens <= sequence.num_tokens, "tokens are computed that are not there"
    assert all(not group.host_table for group in waiting if group.status is SequenceStatus.WAITING)
    if not engine.has_unfinished:
        assert engine.block_manager.num_free_blocks == len(engine.block_manager.pool.blocks)
        pinned = engine.block_manager.host_pool.pinned
        assert engine.block_manager.host_pool.num_free == engine.info.num_host_blocks - len(pinned)
        held = [] if states is None else states._held  # by copies of the next step, for what has ended meanwhile
        for attached in engine.block_manager.prefix_cache.attachments:
            num_held = len(held) if states is not None and attached is states.snapshots else 0
            assert attached.pages.num_free == len(attached.pages.blocks) - num_held
            assert attached.store.num_free == len(attached.store.pages.blocks) - len(attached.store.pinned)


def metrics_of(engine: Engine) -> EngineMetrics:
    """Return the observer that keeps the engine's metrics."""
    return next(observer for observer in engine.observers.members if isinstance(observer, EngineMetrics))


def run_to_end(engine: Engine, max_steps: int = 10_000) -> dict[str, list[int]]:
    """Step until nothing is left, checking the invariants; return every request's tokens (of its answer 0)."""
    answers = run_all_to_end(engine, max_steps)
    return {request_id: tokens for (request_id, index), tokens in answers.items() if not index}


def run_all_to_end(engine: Engine, max_steps: int = 10_000) -> dict[tuple[str, int], list[int]]:
    """Step until nothing is left, checking the invariants; return the tokens of every (request, answer)."""
    tokens: dict[tuple[str, int], list[int]] = {}
    for _ in range(max_steps):
        if not engine.has_unfinished:
            return tokens
        for output in engine.step():
            tokens.setdefault((output.request_id, output.index), []).extend(output.token_ids)
        check_integrity(engine)
    raise AssertionError(f"requests are unfinished after {max_steps} steps")
