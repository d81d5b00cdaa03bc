"""SharingLog: logs how many KV blocks the answers of one request shared."""

from __future__ import annotations

import logging

from engine.errors import OverloadedError
from engine.observability.observer import EngineObserver
from engine.sequence import SequenceGroup

__all__ = ["SharingLog"]

logger = logging.getLogger(__name__)


class SharingLog(EngineObserver):
    """Logs a line for each request whose answers shared blocks; its numbers are from when sharing saved the most."""

    def request_left(self, group: SequenceGroup, rejection: OverloadedError | None) -> None:
        if group.num_blocks_saved:
            saved, held = group.num_blocks_saved, group.num_blocks_held
            logger.info(
                "request %s: sharing saved %d of the %d KV blocks of its answers (%.0f%%)",
                group.request_id,
                saved,
                held,
                100 * saved / held,
            )
