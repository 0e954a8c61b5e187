"""Which JSON Schemas can be enforced while a text is generated: the check at every door, without a compiler.

The compiler of grammars (xgrammar) leaves out in silence what it cannot express, and an answer would then break the
schema that it was promised to keep. So every keyword must be known here to be enforced, in the combination it stands
in, or the schema is refused with the place at fault. Names of the allowed keywords are those of draft 2020-12.
"""

from collections.abc import Iterator
from typing import Any, Final

from runtime.errors import invalid
from runtime.json_schema_recursion import first_endless

MAX_JSON_DEPTH: Final = 64
MAX_ENUM_VALUES: Final = 1000  # in the whole schema; compiling takes time for each
MAX_SUBSCHEMAS: Final = 2000

_ANNOTATIONS: Final = frozenset(
    [
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        "$schema",
        "discriminator",
    ]
)
_DEFINITIONS: Final = frozenset({"$defs", "definitions"})
# Each of these says everything; beside it only annotations are enforced.
_ALONE: Final = frozenset({"$ref", "anyOf", "oneOf", "allOf"})
_LISTED: Final = frozenset({"enum", "const"})
_KEYWORDS_OF: Final = {
    "object": frozenset(
        [
            "properties",
            "required",
            "additionalProperties",
            "patternProperties",
            "propertyNames",
            "minProperties",
            "maxProperties",
        ]
    ),
    "array": frozenset(["items", "prefixItems", "minItems", "maxItems", "uniqueItems"]),
    "string": frozenset(["minLength", "maxLength", "pattern", "format"]),
    "number": frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]),
    "integer": frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]),
    "boolean": frozenset[str](),
    "null": frozenset[str](),
}
_FORMATS: Final = frozenset(
    [
        "date",
        "time",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "uri",
        "uri-reference",
        "uri-template",
        "uuid",
        "json-pointer",
        "relative-json-pointer",
    ]
)
_ONE_SCHEMA: Final = ("items", "additionalProperties", "propertyNames")
_LIST_OF_SCHEMAS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED_SCHEMAS: Final = ("properties", "patternProperties", "$defs", "definitions")
_EXCLUDING: Final = (
    ("pattern", ("minLength", "maxLength", "format")),
    ("format", ("minLength", "maxLength")),
    ("patternProperties", ("properties", "propertyNames", "minProperties")),
    ("propertyNames", ("properties", "minProperties")),
)


def check_schema(field: str, document: Any) -> None:
    """Refuse a schema with anything that would not be enforced, or too much of it.

    `document` is parsed JSON, nested at most MAX_JSON_DEPTH deep. Raises KvferryError (INVALID_REQUEST) naming `field`
    and the place in the schema.
    """
    schemas: dict[str, Any] = {}
    references: list[tuple[str, Any]] = []
    num_values = 0
    pending: list[tuple[str, Any]] = [("#", document)]
    while pending:
        place, schema = pending.pop()
        schemas[place] = schema
        if len(schemas) > MAX_SUBSCHEMAS:
            raise invalid(field, f"has more than {MAX_SUBSCHEMAS} schemas in it")
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, dict):
            raise invalid(field, f"at {place}: a schema must be an object or a boolean")
        try:
            _check_keywords(schema)
            pending.extend((f"{place}/{path}", inner) for path, inner in _inner(schema))
        except ValueError as error:
            raise invalid(field, f"at {place[:200]}: {error}") from None
        num_values += len(schema["enum"]) if "enum" in schema else 0
        if num_values > MAX_ENUM_VALUES:
            raise invalid(field, f"has more than {MAX_ENUM_VALUES} values in enum")
        if "$ref" in schema:
            references.append((place, schema["$ref"]))
    for place, target in references:
        if not isinstance(target, str) or target not in schemas:
            raise invalid(field, f"at {place[:200]}: $ref must be the place of a schema in this one, such as #/$defs/x")
    for place, schema in schemas.items():
        if isinstance(schema, dict) and "oneOf" in schema and not _disjoint(schema["oneOf"], schemas):
            raise invalid(
                field,
                f"at {place[:200]}: oneOf needs branches of different types, or objects that all require one property "
                "with a different const (anyOf has no such condition)",
            )
    endless = first_endless(schemas)
    if endless is not None:
        raise invalid(field, f"at {endless[:200]}: comes back to itself without a way to an end")


def rebased(schema: Any, place: str) -> Any:
    """`schema`, which passed `check_schema`, as a part of another one: a copy whose references lead to the same schemas
    when it stands at `place`, such as `#/items`."""
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword == "$ref":
            moved[keyword] = place + value[1:]
        elif keyword in _ONE_SCHEMA:
            moved[keyword] = rebased(value, place)
        elif keyword in _LIST_OF_SCHEMAS:
            moved[keyword] = [rebased(inner, place) for inner in value]
        elif keyword in _NAMED_SCHEMAS:
            moved[keyword] = {name: rebased(inner, place) for name, inner in value.items()}
        else:
            moved[keyword] = value
    return moved


def _check_keywords(schema: dict[str, Any]) -> None:
    """Raises ValueError."""
    keywords = set(schema) - _ANNOTATIONS - _DEFINITIONS
    for alone in sorted(_ALONE & keywords):
        if len(keywords) > 1:
            raise ValueError(f"{alone} cannot be combined with {_others(keywords, alone)}")
    if alone_list := _ALONE & keywords:
        if "allOf" in alone_list and len(_list(schema, "allOf")) != 1:
            raise ValueError("allOf with more than one schema is not supported")
        return
    types = _types(schema)
    for listed in sorted(_LISTED & keywords):
        if keywords - {listed, "type"}:
            raise ValueError(f"{listed} cannot be combined with {_others(keywords - {'type'}, listed)}")
        values = _list(schema, "enum") if listed == "enum" else [schema["const"]]
        if types and not all(any(_has_type(value, name) for name in types) for value in values):
            raise ValueError(f"{listed} has a value that is not of the type given")
    keywords -= _LISTED | {"type"}
    for excluding, others in _EXCLUDING:
        if excluding in keywords and (both := keywords & set(others)):
            raise ValueError(f"{excluding} cannot be combined with {', '.join(sorted(both))}")
    # Keywords of objects and arrays imply the type; without it the compiler would drop the others.
    usable = [_KEYWORDS_OF[name] for name in types or ("object", "array")]
    unknown = keywords.difference(*usable)
    if unknown:
        name = min(unknown)
        known = any(name in names for names in _KEYWORDS_OF.values())
        raise ValueError(f"{name[:60]!r} " + ("needs a type that it applies to" if known else "is not supported"))
    if not types and all(keywords & names for names in usable):
        raise ValueError("type must be given")
    _check_values(schema)


def _check_values(schema: dict[str, Any]) -> None:
    if schema.get("uniqueItems", False) is not False:
        raise ValueError("uniqueItems is not supported")
    if "format" in schema and not (isinstance(schema["format"], str) and schema["format"] in _FORMATS):
        raise ValueError(f"format must be one of {', '.join(sorted(_FORMATS))}")
    if "multipleOf" in schema and type(schema["multipleOf"]) is not int:
        raise ValueError("multipleOf must be an integer")
    if "multipleOf" in schema and "number" in _types(schema):
        raise ValueError("multipleOf needs the type integer")
    names, patterns = _named(schema, "properties"), _named(schema, "patternProperties")
    for name in _list(schema, "required") if "required" in schema else ():
        if not isinstance(name, str) or name not in names:
            raise ValueError("required has a name that properties does not describe")
    open_ended = schema.get("additionalProperties", False) is not False
    if open_ended and ("patternProperties" in schema or "minProperties" in schema):
        raise ValueError("additionalProperties cannot be combined with patternProperties or minProperties")
    if len(patterns) > 1:
        raise ValueError("patternProperties with more than one pattern is not supported")


def _inner(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas in this one, with their places as a JSON pointer writes them."""
    for keyword in _ONE_SCHEMA:
        if keyword in schema:
            inner = schema[keyword]
            if keyword == "propertyNames" and isinstance(inner, dict):
                inner = {"type": "string", **inner}  # what a name is without saying so
            yield keyword, inner
    for keyword in _LIST_OF_SCHEMAS:
        if keyword in schema:
            yield from ((f"{keyword}/{index}", inner) for index, inner in enumerate(_list(schema, keyword)))
    for keyword in _NAMED_SCHEMAS:
        named = _named(schema, keyword)
        yield from ((f"{keyword}/{name.replace('~', '~0').replace('/', '~1')}", inner) for name, inner in named.items())


def _types(schema: dict[str, Any]) -> list[str]:
    if "type" not in schema:
        return []
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not types or not all(isinstance(name, str) and name in _KEYWORDS_OF for name in types):
        raise ValueError(f"type must be one or more of {', '.join(sorted(_KEYWORDS_OF))}")
    return types


def _list(schema: dict[str, Any], keyword: str) -> list[Any]:
    value = schema[keyword]
    if not isinstance(value, list) or (not value and keyword != "required"):
        raise ValueError(f"{keyword} must be an array that is not empty")
    return value


def _named(schema: dict[str, Any], keyword: str) -> dict[str, Any]:
    named = schema.get(keyword, {})
    if not isinstance(named, dict):
        raise ValueError(f"{keyword} must be an object")
    return named


def _others(keywords: set[str], name: str) -> str:
    return ", ".join(sorted(keywords - {name}))[:200]


def _has_type(value: Any, name: str) -> bool:
    kinds: dict[str, tuple[type, ...]] = {
        "object": (dict,),
        "array": (list,),
        "string": (str,),
        "number": (int, float),
        "integer": (int,),
        "boolean": (bool,),
        "null": (type(None),),
    }
    return isinstance(value, kinds[name]) and (name == "boolean" or not isinstance(value, bool))


def _disjoint(branches: list[Any], schemas: dict[str, Any]) -> bool:
    """Whether no value can match two of the branches, by their types or by what one property must be."""
    resolved = [_follow(branch, schemas) for branch in branches]
    if not all(isinstance(branch, dict) for branch in resolved):
        return False
    kinds = [{"number" if name == "integer" else name for name in _types(branch)} for branch in resolved]
    if all(kinds) and sum(map(len, kinds)) == len(set().union(*kinds)):
        return True
    if any(kind != {"object"} for kind in kinds):
        return False
    shared = set.intersection(*(set(branch.get("required", ())) for branch in resolved))
    return any(_differ([_follow(branch["properties"][name], schemas) for branch in resolved]) for name in shared)


def _differ(tags: list[Any]) -> bool:
    values: list[str] = []
    for tag in tags:
        listed = tag.get("enum", [tag["const"]] if "const" in tag else None) if isinstance(tag, dict) else None
        if not listed or not all(isinstance(value, str) for value in listed):
            return False
        values.extend(set(listed))
    return len(values) == len(set(values))


def _follow(schema: Any, schemas: dict[str, Any]) -> Any:
    """What a chain of references leads to; the schema itself where it goes in circles."""
    for _ in range(MAX_JSON_DEPTH):
        if not (isinstance(schema, dict) and "$ref" in schema):
            break
        schema = schemas[schema["$ref"]]
    return schema
