"""Validation against a CustomResourceDefinition, as strict as `kubectl apply --validate=strict`.

The API server drops fields that a schema does not name, unless it is asked to be strict; here each is an error. Rules
in CEL (`x-kubernetes-validations`) are not evaluated.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend

SCHEMAS = Path(__file__).parent / "schemas"
Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _unique_by_keys(_: Any, keys: list[str], items: Any, schema: dict[str, Any]) -> Iterator[ValidationError]:
    """Reject duplicate items of a list that is a map by some of their keys, such as two ports with one name."""
    seen = set()
    for item in items if isinstance(items, list) else []:
        defaults = {key: schema["items"]["properties"].get(key, {}).get("default") for key in keys}
        identity = tuple(item.get(key, defaults[key]) for key in keys)
        if identity in seen:
            yield ValidationError(f"{identity} is there twice")
        seen.add(identity)


_Validator = extend(Draft202012Validator, {"x-kubernetes-list-map-keys": _unique_by_keys})


def strict(schema: Any) -> Any:
    """Return a structural schema that forbids properties without a schema."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    stricter = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict):  # not a property of that name
        stricter["properties"] = {name: strict(value) for name, value in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            stricter.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        stricter.pop("type", None)
        stricter["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if schema.get("nullable"):
        stricter = {"anyOf": [stricter, {"type": "null"}]}
    return stricter


@cache
def validator(file: str, version: str) -> Draft202012Validator:
    """Return a validator for objects of one served version of a definition in `schemas/`."""
    definition = yaml.load(gzip.decompress((SCHEMAS / file).read_bytes()), Loader=Loader)
    (versioned,) = [item for item in definition["spec"]["versions"] if item["name"] == version and item["served"]]
    schema = strict(versioned["schema"]["openAPIV3Schema"])
    checker: Draft202012Validator = _Validator(schema)
    return checker


def mistakes(file: str, instance: dict[str, Any]) -> list[str]:
    """Return one line for each error."""
    errors = validator(file, instance["apiVersion"].rpartition("/")[2]).iter_errors(instance)
    return [f"{error.json_path}: {error.message[:200]}" for error in errors]
