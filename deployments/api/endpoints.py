"""Endpoints: those of all APIs, at one ingress. The ``routes()`` of a new API is a line here."""

from __future__ import annotations

from collections.abc import Sequence

from deployments.api.anthropic.endpoints import MessagesApi
from deployments.api.batches.endpoints import Batches, Files
from deployments.api.body import BodyReader
from deployments.api.lazy_prompt_builder import LazyPromptBuilder
from deployments.api.openai.endpoints import Models, OpenAiApi
from deployments.api.pooling.endpoints import PoolingApi
from deployments.api.pooling.serving import PoolingServing
from deployments.api.responses.endpoints import Responses
from deployments.api.routes import ApiRoute
from deployments.api.serving import Serving
from deployments.api.utilities.invocations import Invocations
from deployments.api.utilities.server import Replicas, ServerState
from deployments.api.utilities.tokenization import Tokenization
from deployments.batch.answers import ENDPOINTS
from deployments.batch.service import BatchService
from deployments.config import AppConfig
from deployments.routing.cluster_view import ClusterView

__all__ = ["Endpoints"]


class Endpoints:
    """Every endpoint of one ingress.

    Args:
        config: the application's configuration.
        serving: answers the requests for tokens.
        pooling: answers those for embeddings and scores.
        prompts: knows the engines' description.
        view: the engines that the router knows.
        replicas: calls all replicas.
        batches: keeps files and batches, if there is a directory for them.
        page: the endpoints of the web page, if it is on.
        needs_key: whether API keys are set.

    Attributes:
        routes: the endpoints.
        responses: those of the Responses API, with the responses that this ingress keeps.
    """

    def __init__(
        self,
        config: AppConfig,
        serving: Serving,
        pooling: PoolingServing,
        prompts: LazyPromptBuilder,
        view: ClusterView,
        replicas: Replicas,
        *,
        batches: BatchService | None = None,
        page: Sequence[ApiRoute] = (),
        needs_key: bool,
    ) -> None:
        bodies = BodyReader(config.limits.max_body_bytes, config.limits.body_timeout_s)
        state = ServerState(config, prompts, view, replicas, lambda: self.routes, needs_key=needs_key)
        self.responses = Responses(serving, bodies, config.limits, replicas.ask_ingresses)
        self.routes: list[ApiRoute] = [
            *OpenAiApi(serving, bodies).routes(),
            *self.responses.routes(),
            *MessagesApi(serving, bodies, strip_billing_header=config.strip_billing_header).routes(),
            *PoolingApi(pooling, bodies).routes(),
            *Files(batches, config.limits.body_timeout_s).routes(),
            *Batches(batches, bodies, _batch_endpoints(config)).routes(),
            *Models(serving).routes(),
            *Invocations(serving, bodies).routes(),
            *Tokenization(serving, bodies).routes(),
            *state.routes(),
            *page,
        ]


def _batch_endpoints(config: AppConfig) -> list[str]:
    """Return the endpoints that the lines of a batch may name."""
    if config.task == "generate":
        return [path for path in ENDPOINTS if path != "/v1/embeddings"]
    return ["/v1/embeddings"] if config.task == "embed" else []
