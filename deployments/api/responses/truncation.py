"""``truncation: auto``: the first turns of a conversation are dropped until the rest fits the context."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from deployments.api.responses.input_items import InputItem, InputMessage

__all__ = ["last_turns"]


async def last_turns(
    items: Sequence[InputItem], fits: Callable[[Sequence[InputItem]], Awaitable[bool]]
) -> Sequence[InputItem] | None:
    """Return as many of the last turns as fit, but not all; None if not even the last one fits.

    A turn starts with a message that is not the assistant's. ``fits`` is called a logarithmic number of times, as each
    call renders and tokenises the items.
    """
    starts = [index for index, item in enumerate(items) if index and _starts_turn(item)]
    low, high = 0, len(starts)  # the turn at starts[high] and those after it fit, if there is one
    while low < high:
        middle = (low + high) // 2
        if await fits(items[starts[middle] :]):
            high = middle
        else:
            low = middle + 1
    return items[starts[low] :] if low < len(starts) else None


def _starts_turn(item: InputItem) -> bool:
    return isinstance(item, InputMessage) and item.role != "assistant"
