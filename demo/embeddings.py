"""Token embeddings from a bag-of-words model, as the start of the demo model's training.

Before the transformer is trained, a classifier that only adds up the embeddings of a question's tokens learns which
answer is meant (fastText, Joulin et al., 2016). It takes seconds, sees no order of words, and so generalises to
phrasings it has not seen; the transformer keeps much of that when it begins with these embeddings. On this little text
it would else need hours to find out for itself which words matter.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from demo.conversations import ConversationMaker
from demo.corpus import Corpus

QUESTIONS, EPOCHS, BATCH = 60_000, 6, 64
PEAK_LR, WEIGHT_DECAY, DROPOUT = 5e-3, 0.01, 0.2
START_STD = 0.04  # of the returned embeddings: similar to the other matrices


def bag_of_words_embeddings(
    corpus: Corpus, tokenizer: PreTrainedTokenizerFast, seed: int, *, vocab_size: int, hidden_size: int
) -> torch.Tensor:
    """Embeddings [vocab_size, hidden_size]; a linear layer predicts the answer from their sum over the question."""
    questions, answers = _labelled_questions(corpus, seed)
    ids = tokenizer(questions).input_ids
    labels = {answer: label for label, answer in enumerate(sorted(set(answers)))}
    wanted = torch.tensor([labels[answer] for answer in answers])
    bag = nn.EmbeddingBag(vocab_size, hidden_size, mode="sum")
    nn.init.normal_(bag.weight, 0.0, 0.05)
    classifier = nn.Linear(hidden_size, len(labels))
    optimizer = torch.optim.AdamW([*bag.parameters(), *classifier.parameters()], lr=PEAK_LR, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=EPOCHS * (QUESTIONS // BATCH + 1))
    for _ in range(EPOCHS):
        order = torch.randperm(QUESTIONS)
        for begin in range(0, QUESTIONS, BATCH):
            rows = order[begin : begin + BATCH]
            summed = bag(*_packed([ids[row] for row in rows.tolist()]))
            loss = nn.functional.cross_entropy(classifier(nn.functional.dropout(summed, DROPOUT)), wanted[rows])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
    return bag.weight.detach() / bag.weight.detach().std() * START_STD


def _labelled_questions(corpus: Corpus, seed: int) -> tuple[list[str], list[str]]:
    """Rewritten questions and their answers."""
    maker = ConversationMaker(corpus, seed)
    drills = [maker.drill() for _ in range(QUESTIONS)]
    return [drill[-2]["content"] for drill in drills], [drill[-1]["content"] for drill in drills]


def _packed(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The concatenated tokens of the rows, and the offset of each row."""
    lengths = torch.tensor([0, *map(len, rows[:-1])])
    return torch.tensor([token for row in rows for token in row]), lengths.cumsum(0)
