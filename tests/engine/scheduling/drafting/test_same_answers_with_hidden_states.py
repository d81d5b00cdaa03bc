"""With drafts of an MTP layer or an EAGLE-3 head, an answer is the one without them, bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.llm import LLM
from engine.models.config.files.hf_config import load_hf_config
from engine.sampling_params import SamplingParams
from kernels.cpu.library import library
from kernels.cpu.linear import has_int8
from tests.engine.checkpoints import build_model
from tests.engine.models.decoder.recurrent.recurrent_families import build_recurrent_model
from tests.engine.models.eagle3.eagle3_heads import HEAD_FORMS, Eagle3Oracle
from tests.engine.models.mtp.mtp_families import LAST_IS_FULL, MTP_FAMILIES, MtpOracle
from tests.engine.models.test_speculative_generation import DraftCounter
from tests.engine.oracle import make_llm
from tests.engine.scheduling.drafting.test_same_answers import (
    DEMO_MODEL,
    SETTINGS,
    all_bytes,
    generate,
    params,
)
from tests.engine.worker.drafting.draft_logits import DraftOracle

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")

# Models with the vocabulary of the demo model.
BUILD = {
    "mimo": lambda size: build_model("qwen2", use_sliding_window=False, vocab_size=size),
    "qwen3.5": lambda size: build_recurrent_model(
        "qwen3.5", **LAST_IS_FULL, tie_word_embeddings=False, vocab_size=size
    ),
}


def new_oracle(name: str) -> DraftOracle:
    size = load_hf_config(DEMO_MODEL).vocab_size
    if name == "eagle3":
        return Eagle3Oracle(HEAD_FORMS["two layers"], vocab_size=size)
    return MtpOracle(replace(MTP_FAMILIES[name], build=lambda: BUILD[name](size)))


ENGINES = [
    ("mimo", "float32"),
    ("qwen3.5", "bfloat16"),
    ("eagle3", "bfloat16"),
    pytest.param(("mimo", "bfloat16"), marks=pytest.mark.long),
    pytest.param(("qwen3.5", "float32"), marks=pytest.mark.long),
    pytest.param(("eagle3", "float32"), marks=pytest.mark.long),
    pytest.param(("mimo", "int8"), marks=pytest.mark.long),
    pytest.param(("eagle3", "int8"), marks=pytest.mark.long),
    pytest.param(("eagle3", "int4"), marks=pytest.mark.long),
    pytest.param(("qwen3.5", "int4"), marks=pytest.mark.long),
]


class Engines:
    """One engine without drafts, and one with drafts for each of ``SETTINGS``."""

    def __init__(self, name: str, kind: str) -> None:
        self._folder = TemporaryDirectory()
        oracle = new_oracle(name)
        oracle.let_agree()
        path = oracle.save(Path(self._folder.name))
        for file in Path(DEMO_MODEL).glob("tokenizer*"):
            shutil.copy(file, path)
        quantization = {"quantization": kind} if kind.startswith("int") else {}
        shared = {"dtype": "bfloat16" if quantization else kind} | quantization

        def load(**options: Any) -> LLM:
            sizes = {} if "num_blocks" in options else {"kv_cache_memory": "16MiB"}
            return make_llm(path, skip_tokenizer_init=False, max_model_len=160, **sizes | shared | options)

        self.plain = load()
        speculation = oracle.speculation(path, 3)
        if name == "eagle3":
            speculation |= quantization
        self.drafting = {name: load(speculative_config=speculation, **options) for name, options in SETTINGS.items()}

    def close(self) -> None:
        """End the engines."""
        for llm in (self.plain, *self.drafting.values()):
            llm.engine.close()
        self._folder.cleanup()


@pytest.fixture(scope="module", params=ENGINES, ids=" ".join)
def engines(request: pytest.FixtureRequest) -> Iterator[Engines]:
    if request.param[1] == "int8" and not has_int8():
        pytest.skip("the processor does not multiply int8")
    engines = Engines(*request.param)
    yield engines
    engines.close()


def check_same(engines: Engines, requests: list[SamplingParams]) -> None:
    """Assert that drafts change nothing in any setting."""
    expected = all_bytes(generate(engines.plain, requests))
    for name, llm in engines.drafting.items():
        assert all_bytes(generate(llm, requests)) == expected, name


def test_many_drafts_are_right_and_many_are_wrong(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the other tests of this file would compare nothing."""
    drafts = DraftCounter(monkeypatch)
    check_same(
        engines,
        [
            SamplingParams(temperature=0.7 * (seed % 3), seed=seed, max_tokens=30, logprobs=2, ignore_eos=True)
            for seed in range(8)
        ],
    )
    assert drafts.num_accepted > 100
    assert drafts.num_drafted - drafts.num_accepted > 100


@given(requests=st.lists(params(), min_size=1, max_size=4))
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_parameters(engines: Engines, requests: list[SamplingParams]) -> None:
    check_same(engines, requests)


@pytest.mark.exhaustive("1,200 requests in four minutes")
@pytest.mark.timeout(3600)
@given(requests=st.lists(params(), min_size=8, max_size=8))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_two_hundred_requests(engines: Engines, requests: list[SamplingParams]) -> None:
    check_same(engines, requests)
