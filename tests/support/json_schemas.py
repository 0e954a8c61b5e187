"""Fifty JSON Schemas, each with a keyword or a combination of its own, all with bounded values so that answers end."""

from typing import Any

Schema = dict[str, Any]

SMALL: Schema = {"type": "integer", "minimum": 0, "maximum": 9}
FLAG: Schema = {"type": "boolean"}
NOTHING: Schema = {"type": "null"}
WORD: Schema = {"type": "string", "minLength": 1, "maxLength": 8}
LETTERS: Schema = {"type": "string", "pattern": "^[a-z]{1,5}$"}


def obj(properties: Schema, **more: Any) -> Schema:
    """An object with all of these properties."""
    return {"type": "object", "properties": properties, "required": list(properties), **more}


def array(items: Schema, low: int = 0, high: int = 3, **more: Any) -> Schema:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high, **more}


def _tagged(tag: str, **properties: Schema) -> Schema:
    return obj({"kind": {"const": tag}, **properties})


TREE: Schema = {
    "$defs": {"node": obj({"value": SMALL, "next": {"anyOf": [{"$ref": "#/$defs/leaf"}, NOTHING]}}), "leaf": SMALL},
    "$ref": "#/$defs/node",
}
LIST: Schema = {
    "$defs": {"cell": {"anyOf": [NOTHING, obj({"head": FLAG, "tail": {"$ref": "#/$defs/cell"}})]}},
    "$ref": "#/$defs/cell",
}

SCHEMAS: list[Schema] = [
    obj({"a": SMALL}),
    obj({"a": SMALL, "b": FLAG}),
    obj({"name": WORD, "age": {"type": "integer", "minimum": 1, "maximum": 120}}),
    {"type": "object", "properties": {"a": SMALL, "b": FLAG}, "required": ["b"]},
    {"type": "object", "properties": {"a": FLAG, "b": NOTHING}},
    obj({"a": obj({"b": obj({"c": SMALL})})}),
    obj({"tags": array(LETTERS)}),
    obj({"points": array(array(SMALL, 2, 2), 1, 2)}),
    array(SMALL, 1, 4),
    array(FLAG, 3, 3),
    array(obj({"id": SMALL}), 1, 2),
    {"type": "array", "prefixItems": [SMALL, FLAG, NOTHING], "items": False, "minItems": 3},
    {"type": "array", "prefixItems": [SMALL], "items": FLAG, "minItems": 2, "maxItems": 3},
    {"type": "array", "items": SMALL, "uniqueItems": False, "maxItems": 2},
    {"enum": ["red", "green", "blue"]},
    {"enum": ["a", 1, None, True, 1.5, {"x": [1]}]},
    {"type": "string", "enum": ["yes", "no"]},
    {"type": ["integer", "null"], "enum": [1, None]},
    {"const": {"fixed": ["é", '"', "\\"]}},
    obj({"version": {"const": 2}, "mode": {"enum": ["fast", "slow"]}}),
    {"type": "integer", "minimum": -20, "maximum": 20},
    {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6},
    {"type": "integer", "multipleOf": 7, "minimum": 10, "maximum": 100},
    {"type": "number", "minimum": -1.5, "maximum": 2.25},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": ["boolean", "null"]},
    {"type": "string", "maxLength": 12},
    {"type": "string", "minLength": 3, "maxLength": 3},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    {"type": "string", "pattern": "^(foo|bar)+baz$"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    obj({"when": {"type": "string", "format": "time"}, "who": LETTERS}),
    {"anyOf": [SMALL, NOTHING, LETTERS]},
    {"anyOf": [obj({"a": FLAG}), obj({"b": FLAG}), array(FLAG, 0, 1)]},
    {"oneOf": [SMALL, FLAG, NOTHING]},
    {"oneOf": [_tagged("cat", lives=SMALL), _tagged("dog", good=FLAG)]},
    {"allOf": [obj({"a": SMALL})]},
    obj({"maybe": {"anyOf": [LETTERS, NOTHING], "default": None, "title": "Maybe"}}, title="Model", description="x"),
    {"$defs": {"x": SMALL}, **obj({"a": {"$ref": "#/$defs/x"}, "b": {"$ref": "#/$defs/x"}})},
    {"definitions": {"a/b": FLAG}, **obj({"a": {"$ref": "#/definitions/a~1b"}})},
    obj({"a": FLAG, "b": {"$ref": "#/properties/a"}}),
    TREE,
    LIST,
    {"type": "object", "properties": {"a": NOTHING, "b": NOTHING, "c": NOTHING}, "minProperties": 2},
    {"type": "object", "properties": {"a": FLAG, "b": FLAG, "c": FLAG}, "minProperties": 1, "maxProperties": 1},
    {"type": "object", "patternProperties": {"^x[a-c]$": FLAG}, "additionalProperties": False, "maxProperties": 2},
    {"type": "object", "additionalProperties": NOTHING, "propertyNames": {"pattern": "^[ab]{2}$"}, "maxProperties": 2},
    obj({'quote"d': FLAG, "line\nbreak": SMALL, "ünï": NOTHING, "": FLAG}),
    {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **obj({"a": {"type": "array", "items": LIST["$defs"]["cell"]["anyOf"][0], "maxItems": 2}, "b": WORD}),
    },
]
