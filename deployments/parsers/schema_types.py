"""Which JSON types a schema allows, for formats that write values as text. No one has checked the schemas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from deployments.parsers.schema_references import Schema, is_resource, reference_of, target

__all__ = ["ANY", "Allowed", "Schema", "SchemaPart", "Tools"]

ANY = "any"  # what a schema refers to or combines, but does not limit
Tools: TypeAlias = Mapping[str, Schema]  # name -> JSON schema of the parameters
_COMBINED = ("$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "then", "else", "enum", "const")
_MAX_REFERENCES = 64  # that are followed for one value; beyond them anything is allowed
_JSON_TYPES: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),  # before its base class int
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
    (type(None), "null"),
)
_ANNOTATIONS = ("title", "description", "$comment", "examples", "default", "deprecated")
# Keywords that say something about values of one type only: what is meant where nothing names a type.
_NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_MEANT: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("pattern", "minLength", "maxLength"), frozenset(["string"])),
    **dict.fromkeys(_NUMERIC, frozenset(["integer", "number"])),
    **dict.fromkeys(("properties", "additionalProperties", "patternProperties", "required"), frozenset(["object"])),
    **dict.fromkeys(("items", "prefixItems", "minItems", "maxItems", "uniqueItems"), frozenset(["array"])),
}


class Allowed(NamedTuple):
    """Which values a schema allows.

    Attributes:
        types: as ``SchemaPart.types``.
        listed: the values that ``enum`` and ``const`` list. Of different types, they tell what a text stands for.
    """

    types: set[str]
    listed: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class SchemaPart:
    """What a document says about one value: one schema, or several that say something about it.

    Attributes:
        document: the schema around it all.
        schemas: each with the schema that its references start from.
    """

    document: Schema
    schemas: tuple[tuple[Schema, Schema], ...]

    @classmethod
    def of(cls, document: Schema) -> SchemaPart:
        """Return the part that is a whole document."""
        return cls(document, ((document, document),))

    @property
    def types(self) -> set[str]:
        """The types of the values that are allowed, as JSON Schema 2020-12 combines its keywords.

        They are names of JSON types; a number may be an integer, too. Where nothing limits the type, it is the one that
        other keywords are about. Empty if the schemas say nothing, ANY alone if what they refer to says nothing.
        """
        known: dict[tuple[int, str], set[str] | None] = {}
        limits = [self._allowed(*part, known) for part in self.schemas]
        limiting = [types for types in limits if types is not None]
        if limiting:
            return set().union(*limiting)
        if meant := {name for part, _ in self._parts() for key in _MEANT if key in part for name in _MEANT[key]}:
            return meant
        return {ANY} if any(key in schema for schema, _ in self.schemas for key in _COMBINED) else set()

    @property
    def allowed(self) -> Allowed:
        """The types, and the listed values, of all schemas and those that they refer to and combine."""
        return Allowed(self.types, tuple(value for part, _ in self._parts() for value in _listed(part)))

    def property(self, name: str) -> SchemaPart:
        """Return what is said about an object's property, directly, through references and in combined schemas."""
        named, others = [], []
        for part, base in self._parts():
            properties, patterns = part.get("properties"), part.get("patternProperties")
            if isinstance(properties, Mapping) and isinstance(declared := properties.get(name), Mapping):
                named.append((declared, base))
            # Whether a pattern matches is not tried: a model's text and a client's pattern could take for ever.
            others_of = map(part.get, ("additionalProperties", "unevaluatedProperties"))
            either = [*(patterns.values() if isinstance(patterns, Mapping) else ()), *others_of]
            others += [(schema, base) for schema in either if isinstance(schema, Mapping)]
        return SchemaPart(self.document, tuple(named or others))

    def item(self, index: int) -> SchemaPart:
        """Return what is said about a list's item, directly, through references and in combined schemas."""
        schemas = []
        for part, base in self._parts():
            first, items = part.get("prefixItems"), part.get("items")
            first = items if isinstance(items, list) else first  # until draft 2019-09
            if isinstance(first, list) and index < len(first):
                items = first[index]
            if isinstance(items, Mapping):
                schemas.append((items, base))
        return SchemaPart(self.document, tuple(schemas))

    def _parts(self) -> Iterator[tuple[Schema, Schema]]:
        """Yield the schemas, and those that they refer to and combine, each reference once."""
        seen: set[tuple[int, str]] = set()
        for schema, base in self.schemas:
            yield from self._parts_of(schema, base, seen)

    def _parts_of(self, schema: Schema, base: Schema, seen: set[tuple[int, str]]) -> Iterator[tuple[Schema, Schema]]:
        base = schema if is_resource(schema) else base
        yield schema, base
        if (reference := reference_of(schema)) is not None:
            key = (id(base), reference)
            if key not in seen and len(seen) < _MAX_REFERENCES:
                seen.add(key)
                yield from self._parts_of(*target(reference, base, self.document), seen)
        for part in (*_schemas(schema, "allOf"), *_schemas(schema, "anyOf"), *_schemas(schema, "oneOf")):
            yield from self._parts_of(part, base, seen)
        dependent = schema.get("dependentSchemas")
        for part in (*_branches(schema), *(dependent.values() if isinstance(dependent, Mapping) else ())):
            if isinstance(part, Mapping):
                yield from self._parts_of(part, base, seen)

    def _allowed(self, schema: Schema, base: Schema, known: dict[tuple[int, str], set[str] | None]) -> set[str] | None:
        """Return the allowed types, or None for all.

        Args:
            schema: one of the document.
            base: what its references start from.
            known: of the references so far, so that none is followed twice; one that is being followed limits nothing.
        """
        base = schema if is_resource(schema) else base
        limits = [_named(schema), _of_values(schema), _not_excluded(schema)]
        if (reference := reference_of(schema)) is not None:
            key = (id(base), reference)
            if key not in known and len(known) < _MAX_REFERENCES:
                known[key] = None
                known[key] = self._allowed(*target(reference, base, self.document), known)
            limits.append(known.get(key))
        limits += [self._allowed(part, base, known) for part in _schemas(schema, "allOf")]
        for alternatives in (_schemas(schema, "anyOf"), _schemas(schema, "oneOf"), _branches(schema)):
            each = [self._allowed(part, base, known) for part in alternatives]
            limiting = [types for types in each if types is not None]
            limits.append(set().union(*limiting) if limiting else None)
        common: set[str] | None = None
        for types in limits:
            if types is not None:
                # Of a contradiction the first keyword counts, so that it does not make text of numbers.
                common = types if common is None else common & types or common
        return common | {"null"} if common and schema.get("nullable") is True else common  # OpenAPI 3.0's name


def _named(schema: Schema) -> set[str] | None:
    listed = schema.get("type")
    types = {name for name in (listed if isinstance(listed, list) else [listed]) if isinstance(name, str)}
    if "number" in types:
        types.add("integer")
    return types or None


def _not_excluded(schema: Schema) -> set[str] | None:
    """Return the types that a negation leaves: ``not``, or a condition whose branch allows nothing."""
    excluded = _of_type_alone(schema.get("not"))
    if schema.get("then") is False:
        excluded = excluded or _of_type_alone(schema.get("if"))
    if excluded is not None:
        return {name for _, name in _JSON_TYPES} - excluded
    return _of_type_alone(schema.get("if")) if schema.get("else") is False else None


def _of_type_alone(schema: Any) -> set[str] | None:
    """Return the types of a schema that says nothing else."""
    return _named(schema) if isinstance(schema, Mapping) and set(schema) <= {"type", *_ANNOTATIONS} else None


def _of_values(schema: Schema) -> set[str] | None:
    """Return the types of the values that ``enum`` and ``const`` list."""
    values = _listed(schema)
    types = {next((name for kind, name in _JSON_TYPES if isinstance(value, kind)), ANY) for value in values}
    if any(isinstance(value, float) and value.is_integer() for value in values):
        types.add("integer")  # JSON Schema 2020-12, core, 4.2.2
    return types or None


def _listed(schema: Schema) -> list[Any]:
    if "const" in schema:
        return [schema["const"]]
    return list(schema["enum"]) if isinstance(schema.get("enum"), list) else []


def _schemas(schema: Schema, key: str) -> list[Schema]:
    value = schema.get(key)
    return [part for part in value if isinstance(part, Mapping)] if isinstance(value, list) else []


def _branches(schema: Schema) -> list[Schema]:
    """Return the schemas that an ``if`` chooses from."""
    branches = [schema.get(key) for key in ("then", "else")] if "if" in schema else []
    return [part for part in branches if isinstance(part, Mapping)]
