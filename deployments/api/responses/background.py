"""BackgroundResponses: the responses that this ingress computes after it has answered the request for them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from deployments.api.error_responses import record_api_error
from deployments.api.json_response import JsonResponse, encode_json
from deployments.api.responses.event_log import EventLog, event_response
from deployments.api.responses.input_items import InputItem
from deployments.api.responses.protocol import ResponseRequest
from deployments.api.responses.resource import ResponseResource
from deployments.api.responses.store import ResponseStore, StoredResponse
from deployments.api.responses.translation import renamed
from deployments.api.responses.writers import BACKGROUND_STAGES
from deployments.api.writers import ResponseHead
from deployments.errors import ApiError
from deployments.request_log.record import CLIENT_CLOSED, current_record
from deployments.requests.generation import Generation
from engine.errors import RequestError

__all__ = ["BackgroundResponses"]


@dataclass(slots=True, eq=False)
class _Run:
    """A response that is being computed."""

    resource: ResponseResource
    generation: Generation
    input: bytes  # the JSON list of its input items
    log: EventLog | None = None  # of a stream
    task: asyncio.Task[None] | None = None

    def stored(self, response: dict[str, Any]) -> StoredResponse:
        """Return one stage of the response as it is kept."""
        item_ids = tuple(item["id"] for item in response["output"])
        status = response["status"]
        return StoredResponse(encoded(response), self.input, item_ids, status=status, is_background=True)

    def present(self) -> dict[str, Any]:
        """Return the response as it is now: in progress from its first token on."""
        status = "in_progress" if self.generation.token_ids else "queued"
        return self.resource.in_progress(self.generation.params) | {"status": status}


class BackgroundResponses:
    """Computes responses in tasks; what has ended is moved to the store.

    How many there can be is limited as for other requests: each is queued or running in an engine.

    Args:
        store: keeps the responses that have ended.
    """

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._running: dict[str, _Run] = {}  # by id
        self._logs: dict[str, EventLog] = {}  # of the streams that have not ended
        self._lock = threading.Lock()  # so that a response is found while it moves to the store

    def start(
        self,
        request: ResponseRequest,
        items: Sequence[InputItem],
        head: ResponseHead,
        generations: Sequence[Generation],
        answer: Callable[[], Awaitable[Response]],
    ) -> Response:
        """Start to compute a response, and return it as it is now: queued; or return its events.

        Args:
            request: the body.
            items: the whole input.
            head: the response's id, time and model.
            generations: the answer.
            answer: computes the response, whose writer calls ``complete``.
        """
        resource = ResponseResource(head, request, is_stored=True)
        run = _Run(resource, generations[0], encoded([item.listed() for item in items]))
        if request.stream:
            queued = run.present()
            run.log = EventLog([{"type": f"response.{stage}", "response": queued} for stage in BACKGROUND_STAGES])
        run.task = current_record().background = asyncio.create_task(self._compute(head.id, run, answer))
        with self._lock:
            self._running[head.id] = run
        if (log := run.log) is None:
            return JsonResponse(run.present())
        self._logs[head.id] = log
        run.task.add_done_callback(lambda _: self._complete_log(head.id, log))
        return event_response(log.events_after)

    def log_of(self, response_id: str) -> EventLog | None:
        """Return the events of a stream that has not ended; None if there is none."""
        return self._logs.get(response_id)

    def complete(self, response: dict[str, Any]) -> None:
        """Keep a response that has its answer, unless it was cancelled or deleted before. Any thread may call this."""
        with self._lock:
            if (run := self._running.pop(response["id"], None)) is not None:
                self._store.put(response["id"], run.stored(response))

    def get(self, response_id: str) -> StoredResponse | None:
        """Return a response that is being computed, as it is now; None if it is not."""
        with self._lock:
            run = self._running.get(response_id)
        return None if run is None else run.stored(run.present())

    def cancel(self, response_id: str) -> None:
        """End a response that is being computed, and keep it as cancelled; nothing if it is not being computed."""
        with self._lock:
            if (run := self._stop(response_id)) is not None:
                response = run.resource.in_progress(run.generation.params) | {"status": "cancelled"}
                self._store.put(response_id, run.stored(response))

    def delete(self, response_id: str) -> bool:
        """End a response that is being computed, and keep nothing of it; returns whether it was being computed."""
        with self._lock:
            return self._stop(response_id) is not None

    def _stop(self, response_id: str) -> _Run | None:
        run = self._running.pop(response_id, None)
        if run is not None and run.task is not None:
            run.task.cancel()
        return run

    def _complete_log(self, response_id: str, log: EventLog) -> None:
        """Keep all events of a response that is kept."""
        del self._logs[response_id]
        self._store.add_events(response_id, log.events)
        log.complete()

    async def _compute(self, response_id: str, run: _Run, answer: Callable[[], Awaitable[Response]]) -> None:
        try:
            response = await answer()
            if run.log is not None:
                await response({"type": "http"}, _receive_nothing, run.log.send)
                if response_id in self._running:  # it has failed; others have been kept by their writer
                    self.complete(json.loads(run.log.events[-1].partition(b"data: ")[2])["response"])
        except asyncio.CancelledError:  # by ``_stop``, which has kept what is to be kept
            current_record().error = ApiError(CLIENT_CLOSED, "the response was cancelled")
        except Exception as error:
            named = renamed(error) if isinstance(error, RequestError) else error
            failed = run.resource.failed(run.generation.params, [], record_api_error(named))
            if run.log is not None:
                run.log.append({"type": "response.failed", "response": failed})
            self.complete(failed)


async def _receive_nothing() -> Any:
    """Wait for ever: a response in the background has no client that disconnects."""
    await asyncio.Future()


def encoded(value: Any) -> bytes:
    """Return JSON in which an unpaired surrogate is an escape."""
    return encode_json(value).encode(errors="backslashreplace")
