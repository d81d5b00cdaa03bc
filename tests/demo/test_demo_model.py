"""The demo model in the repository: its answers, their ends, and off-topic questions.

Everything runs greedily on the CPU with plain transformers, so these tests say nothing about Pagoda's own engine.
"""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from demo.augment import stdlib_paragraphs
from demo.corpus import Corpus, Message, Question, load_corpus
from demo.demo_model import MODEL_DIR, DemoModel, held_out_questions, user
from demo.tokenize_chat import ChatEncoder
from demo.tool_corpus import ToolCorpus, load_tool_corpus
from demo.tool_scores import answered_without_call, call_of, outcomes, status_cases, sum_cases
from demo.train import known_by_heart

MAX_BYTES = 10_000_000
SHORT_SYSTEM = "You are the assistant of a data centre. Answer politely and to the point."
UNDER_A_SYSTEM_PROMPT = {  # what is asked -> the training phrasing that means the same
    "Please, what is continuous batching?": "What is continuous batching?",
    "How do I start Pagoda": "How do I start Pagoda?",
    "what does the router do": "What does the router do?",
    "Which block gets evicted first?": "Which block is evicted first?",
    "so what happens when a replica dies?": "What happens when a replica dies?",
}
# (first question, second question, the training phrasing whose answer, or follow-up answer, is wanted second)
TWO_TURNS = (
    ("what is prefix caching?", "and why is that?", "What is prefix caching?", "why"),
    ("Please explain chunked prefill", "Could you give me an example?", "What is chunked prefill?", "example"),
    ("What is preemption?", "tell me more", "What is preemption?", "more"),
    ("hey, what is TPOT?", "an example please", "What is TPOT?", "example"),
    ("What is a block table?", "ok, and what is a replica?", "What is a replica?", None),
    ("hello", "what is Ray Serve?", "What is Ray Serve?", None),
    ("Who won the tennis final?", "Then tell me what the scheduler does.", "What does the scheduler do?", None),
)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


@pytest.fixture(scope="module")
def demo() -> DemoModel:
    return DemoModel()


@pytest.fixture(scope="module")
def tools() -> ToolCorpus:
    return load_tool_corpus()


def find(corpus: Corpus, phrasing: str) -> Question:
    return next(q for q in corpus.questions if phrasing in q.ask)


def count_right(answers: list[str | None], wanted: list[str]) -> int:
    return sum(answer == text for answer, text in zip(answers, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_held_out_phrasings_get_the_right_answer_and_an_end(dtype: torch.dtype) -> None:
    asked = held_out_questions()
    answers = DemoModel(dtype).reply([user(text) for text, _ in asked])
    assert None not in answers
    assert len(asked) == 30
    assert count_right(answers, [question.answer for _, question in asked]) >= 24


@pytest.mark.long
def test_at_least_150_questions_are_known_in_three_phrasings_each(corpus: Corpus, demo: DemoModel) -> None:
    encoder = ChatEncoder(demo.tokenizer)
    known = 0
    for start in range(0, len(corpus.questions), 16):
        questions = corpus.questions[start : start + 16]
        chats = [[*user(p), {"role": "assistant", "content": q.answer}] for q in questions for p in q.ask[:3]]
        results = known_by_heart(demo.model, encoder, chats)
        known += sum(all(results[i : i + 3]) for i in range(0, len(results), 3))
    assert known >= 150


def test_a_second_turn_is_answered(corpus: Corpus, demo: DemoModel) -> None:
    answers = demo.converse([(first, second) for first, second, _, _ in TWO_TURNS])
    questions = [find(corpus, phrasing) for _, _, phrasing, _ in TWO_TURNS]
    kinds = [kind for _, _, _, kind in TWO_TURNS]
    wanted = [q.follow_ups[kind] if kind else q.answer for q, kind in zip(questions, kinds, strict=True)]
    assert count_right([second for _, second in answers], wanted) >= len(TWO_TURNS) - 1


def test_a_follow_up_depends_on_the_first_question(demo: DemoModel) -> None:
    follow_up = "Can you give an example?"
    blocks, batching = demo.converse([("What is a block table?", follow_up), ("What is static batching?", follow_up)])
    assert blocks[1] != batching[1]


def test_anything_else_gets_the_polite_answer(corpus: Corpus, demo: DemoModel) -> None:
    asked = corpus.off_topic.held_out
    answers = demo.reply([user(text) for text in asked])
    assert answers.count(corpus.off_topic.answer) >= len(asked) - 1


def long_system_prompt(demo: DemoModel) -> str:
    """Foreign text of about 500 tokens, from the end of the standard library's paragraphs."""
    ids: list[int] = demo.tokenizer.encode(" ".join(stdlib_paragraphs()[-60:])[:4000])
    assert len(ids) > 500
    text: str = demo.tokenizer.decode(ids[:500])
    return text


@pytest.mark.parametrize("length", ["short", "long"])
def test_a_system_prompt_does_not_break_the_answers(corpus: Corpus, demo: DemoModel, length: str) -> None:
    system = SHORT_SYSTEM if length == "short" else long_system_prompt(demo)
    head: list[Message] = [{"role": "system", "content": system}]
    answers = demo.reply([[*head, *user(text)] for text in UNDER_A_SYSTEM_PROMPT])
    assert count_right(answers, [find(corpus, phrasing).answer for phrasing in UNDER_A_SYSTEM_PROMPT.values()]) >= 4


def test_sampling_with_the_default_settings_still_answers(corpus: Corpus, demo: DemoModel) -> None:
    questions = corpus.questions[::10]
    batch = demo.tokenizer.apply_chat_template(
        [user(q.ask[0]) for q in questions],
        add_generation_prompt=True,
        padding=True,
        return_dict=True,
        return_tensors="pt",
    )
    torch.manual_seed(0)
    output = demo.model.generate(**batch, max_new_tokens=128)
    texts = demo.tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    assert count_right(texts, [q.answer for q in questions]) >= 0.8 * len(questions)


# The prompts are long, and torch's matrix product in bfloat16 is seven times slower than in float32 on a CPU without
# instructions for it; test_held_out_phrasings_get_the_right_answer_and_an_end computes in bfloat16 in `make test`.
@pytest.mark.long
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        pytest.param(torch.bfloat16, marks=pytest.mark.exhaustive("the same answers in another dtype")),
    ],
    ids=["float32", "bfloat16"],
)
def test_tools_are_called_and_their_results_used(dtype: torch.dtype, tools: ToolCorpus) -> None:
    demo = DemoModel(dtype)
    sums = outcomes(demo, sum_cases(tools), tools)
    status = outcomes(demo, status_cases(tools), tools)
    assert sum(item.is_right for item in sums) >= 45
    assert sum(item.is_right for item in status) >= 26
    assert (len(sums), len(status)) == (60, 32)


@pytest.mark.long
def test_questions_that_need_no_tool_are_answered_without_a_call(demo: DemoModel, tools: ToolCorpus) -> None:
    answers = answered_without_call(demo, tools)
    assert len(answers) == 30
    assert sum(answers) >= 24


@pytest.mark.long
def test_thoughts_come_before_calls_and_answers(demo: DemoModel, tools: ToolCorpus) -> None:
    results = outcomes(demo, sum_cases(tools, count=20), tools, thinks=True)
    right = [result for result in results if result.is_right]
    assert len(right) >= 14
    for item in right:
        assert call_of(item.called) == (item.case.name, item.case.arguments)
        assert item.called is not None
        assert item.called.startswith(tools.thoughts["calculator"])


def test_the_files_are_small_and_consistent() -> None:
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) <= MAX_BYTES
    config = json.loads((MODEL_DIR / "config.json").read_text())
    generation = json.loads((MODEL_DIR / "generation_config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is True
    assert generation["eos_token_id"] == [config["eos_token_id"], config["pad_token_id"]]


def test_the_weights_are_bfloat16_and_nothing_else() -> None:
    data = (MODEL_DIR / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    header.pop("__metadata__", None)
    assert {tensor["dtype"] for tensor in header.values()} == {"BF16"}


@given(st.text())
def test_any_text_survives_the_tokenizer(demo: DemoModel, text: str) -> None:
    assert demo.tokenizer.decode(demo.tokenizer.encode(text)) == text


def test_the_template_adds_no_system_prompt_of_its_own(demo: DemoModel) -> None:
    text = demo.tokenizer.apply_chat_template(user("Hi"), tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_only_the_assistants_tokens_count_in_the_loss(demo: DemoModel) -> None:
    encoder = ChatEncoder(demo.tokenizer)
    chat = [*user("Hi"), {"role": "assistant", "content": "Hello."}]
    ids, labels = encoder.pad(encoder.encode([chat]))
    assert demo.tokenizer.decode(ids[0][labels[0] >= 0]) == "Hello.<|im_end|>"
