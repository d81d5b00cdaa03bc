"""continuations_of: a sequence as it would be after each token of a draft.

The sampler draws the token that follows each draft token from the continuation that ends with it. It reads from it what
it reads from any sequence: the tokens so far, the position, the seed, the parameters and the grammar. Nothing of the
sequence itself changes with a draft, so a rejected one leaves nothing to undo.
"""

from __future__ import annotations

from engine.sequence import Sequence

__all__ = ["continuations_of"]


def continuations_of(sequence: Sequence, draft: list[int]) -> list[Sequence]:
    """Return the sequence after its first, second, ... draft token, up to the first one that cannot be right.

    A token cannot be right if the sequence's grammar does not allow it, or if another one would already have ended the
    sequence.
    """
    continuations: list[Sequence] = []
    grammar = sequence.grammar
    num_known = len(sequence.token_ids) - sequence.num_prompt_tokens
    for count, token_id in enumerate(draft, 1):
        if token_id in sequence.stop_token_ids and num_known + count > sequence.params.min_tokens:
            break
        if grammar is not None:
            grammar = grammar.fork()
            if not grammar.accept(token_id) or grammar.is_terminated:
                break
        continuations.append(sequence.continued(draft[:count], grammar))
    return continuations
