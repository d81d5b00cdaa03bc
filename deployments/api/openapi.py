"""The OpenAPI 3.1 document, made from the routes that are served and the types that check their bodies."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from deployments.api.descriptions import Description
from deployments.api.routes import ApiRoute

__all__ = ["openapi_document"]

_PARAMETER = re.compile(r"\{(\w+)(:\w+)?\}")
_TEMPLATE = "#/components/schemas/{model}"
_KEY_STATUSES = frozenset({401, 403})  # of every path that needs a key
_ALWAYS = frozenset({500, 503})
_JSON, _EVENTS, _FORM = "application/json", "text/event-stream", "multipart/form-data"


def openapi_document(routes: Sequence[ApiRoute], *, version: str, needs_key: bool) -> dict[str, Any]:
    """Return the document.

    Args:
        routes: all endpoints.
        version: Pagoda's.
        needs_key: whether API keys are set.
    """
    names, schemas = _schemas([route.description for route in routes])
    paths: dict[str, Any] = {}
    for route in routes:
        path = _PARAMETER.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, names, needs_key=needs_key)
    components: dict[str, Any] = {"schemas": schemas}
    if needs_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Pagoda", "version": version, "summary": "Large language models on Ray Serve"},
        "paths": paths,
        "components": components,
    }


def _schemas(descriptions: Sequence[Description]) -> tuple[Mapping[type[BaseModel], str], dict[str, Any]]:
    """Return the reference to each type, and the schemas of all types by name."""
    requests = {kind: None for description in descriptions for kind in description.bodies}
    responses: dict[type[BaseModel], None] = {}
    for description in descriptions:
        responses |= dict.fromkeys(
            (description.error, *description.responses, *(description.stream.events if description.stream else ()))
        )
    modes = [(kind, "validation") for kind in requests] + [(kind, "serialization") for kind in responses]
    schemas, definitions = models_json_schema(modes, ref_template=_TEMPLATE)  # type: ignore[arg-type]
    references = {kind: schema["$ref"] for (kind, _), schema in schemas.items() if isinstance(kind, type)}
    return references, definitions["$defs"]  # type: ignore[return-value]


def _operation(route: ApiRoute, references: Mapping[type[BaseModel], str], *, needs_key: bool) -> dict[str, Any]:
    described = route.description
    statuses = described.statuses | _ALWAYS
    is_open = not (needs_key and route.needs_key)
    if not is_open:
        statuses |= _KEY_STATUSES
    operation: dict[str, Any] = {
        "operationId": f"{route.method.lower()}{re.sub(r'[^a-z0-9]+', '_', route.path.lower()).rstrip('_') or '_page'}",
        "summary": (inspect.getdoc(route.endpoint) or "").partition("\n")[0],
        "tags": [described.tag],
        "responses": {"200": _success(described, references)},
    }
    if not is_open:
        operation["security"] = [{"key": []}]
    parameters = [
        {"name": match[1], "in": "path", "required": True, "schema": {"type": "string"}}
        for match in _PARAMETER.finditer(route.path)
    ]
    parameters += [
        {"name": parameter.name, "in": "query", "schema": dict(parameter.schema)} for parameter in described.query
    ]
    if parameters:
        operation["parameters"] = parameters
    if described.bodies:
        schema = _any_of([references[kind] for kind in described.bodies])
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
    elif described.form is not None:
        operation["requestBody"] = {"required": True, "content": {_FORM: {"schema": dict(described.form)}}}
    for status in sorted(statuses):
        content = {_JSON: {"schema": {"$ref": references[described.error]}}}
        operation["responses"][str(status)] = {"description": HTTPStatus(status).phrase, "content": content}
    return operation


def _success(described: Description, references: Mapping[type[BaseModel], str]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if described.media_type is not None:
        content[described.media_type] = {"schema": {"type": "string"}}
    else:
        kinds = [references[kind] for kind in described.responses]
        content[_JSON] = {"schema": _any_of(kinds) if kinds else {"type": "object"}}
    description = "The response."
    if described.stream is not None:
        content[_EVENTS] = {"schema": _event(described, references)}
        description = "The response; with stream: true, server-sent events whose data is JSON."
        if described.stream.ends_with_done:
            description += " The last event is data: [DONE]."
    return {"description": description, "content": content}


def _event(described: Description, references: Mapping[type[BaseModel], str]) -> dict[str, Any]:
    """Return the schema of one event: OpenAPI 3.1 has no words for the whole stream."""
    assert described.stream is not None
    kinds = [references[kind] for kind in (*described.stream.events, described.error)]
    data: dict[str, Any] = {"type": "string", "contentMediaType": _JSON, "contentSchema": _any_of(kinds)}
    if described.stream.ends_with_done:
        data = {"anyOf": [data, {"const": "[DONE]"}]}
    return {"type": "object", "properties": {"event": {"type": "string"}, "data": data}, "required": ["data"]}


def _any_of(references: Sequence[str]) -> dict[str, Any]:
    if len(references) == 1:
        return {"$ref": references[0]}
    return {"anyOf": [{"$ref": reference} for reference in references]}
