"""Bounds of fields that the types of bodies do not carry, because they are checked behind them: for the OpenAPI
document. A test holds each of them against what the server really takes."""

from typing import Any, Final

from runtime.limits import (
    MAX_LOGIT_BIAS,
    MAX_MESSAGES,
    MAX_PROMPTS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_TOOLS,
)

Schema = dict[str, Any]

NULL: Final[Schema] = {"type": "null"}


def _object(properties: Schema, *required: str) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def list_of(items: Schema, most: int, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


# By the name of the field, in every body that has it; `runtime.limits.check_sampling`.
RANGES: Final[dict[str, Schema]] = {
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "repetition_penalty": {"exclusiveMinimum": 0, "maximum": 2},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
}
_STOP_STRING: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_STOP_STRINGS: Final = list_of(_STOP_STRING, MAX_STOP_STRINGS)
_TOKEN_IDS: Final[Schema] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
FUNCTION_NAME: Final[Schema] = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"}
PARAMETERS: Final[Schema] = {
    "type": "object",
    "description": 'A JSON Schema of the type "object".',
    "properties": {"type": {"const": "object"}},
    "required": ["type"],
}
_FUNCTION_FIELDS: Final[Schema] = {
    "name": FUNCTION_NAME,
    "description": {"type": ["string", "null"]},
    # Null or absent: the function takes nothing.
    "parameters": {"anyOf": [PARAMETERS, NULL]},
    "strict": {"type": ["boolean", "null"]},
}
_FUNCTION: Final = _object(_FUNCTION_FIELDS, "name")
_TOOL: Final = _object({"type": {"const": "function"}, "function": _FUNCTION}, "type", "function")
_FLAT_TOOL: Final = _object({"type": {"const": "function"}, **_FUNCTION_FIELDS}, "type", "name")
# By field, then by body and field: what takes the place of the type's schema.
REPLACED: Final[dict[str, Schema]] = {
    "stop": {"anyOf": [_STOP_STRING, _STOP_STRINGS, NULL]},
    "stop_sequences": {"anyOf": [_STOP_STRINGS, NULL]},
    "logit_bias": {
        "anyOf": [
            {
                "type": "object",
                "description": "By token id.",
                "maxProperties": MAX_LOGIT_BIAS,
                "propertyNames": {"pattern": "^[0-9]{1,10}$"},
                "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            },
            NULL,
        ]
    },
}
REPLACED_IN: Final[dict[tuple[str, str], Schema]] = {
    ("CompletionBody", "prompt"): {
        "description": "A string, strings, token ids, or lists of token ids. Ids are below the vocabulary size.",
        "anyOf": [
            {"type": "string"},
            list_of({"type": "string"}, MAX_PROMPTS, 1),
            _TOKEN_IDS,
            list_of(_TOKEN_IDS, MAX_PROMPTS, 1),
        ],
    },
    ("ChatBody", "tools"): {"anyOf": [list_of(_TOOL, MAX_TOOLS, 1), NULL]},
    ("TokenizeBody", "tools"): {"anyOf": [list_of(_TOOL, MAX_TOOLS, 1), NULL]},
    ("ResponsesBody", "tools"): {"anyOf": [list_of(_FLAT_TOOL, MAX_TOOLS), NULL]},
    ("ResponsesBody", "input"): {
        "anyOf": [{"type": "string"}, list_of({"$ref": "#/components/schemas/InputItem"}, MAX_MESSAGES, 1)]
    },
}


def bounded(body: str, schema: Schema) -> Schema:
    """The schema of a body's type with these bounds."""
    fields = {name: _bounded_field(body, name, field) for name, field in schema["properties"].items()}
    return {**schema, "properties": fields}


def _bounded_field(body: str, name: str, schema: Schema) -> Schema:
    replaced = REPLACED_IN.get((body, name)) or REPLACED.get(name)
    if replaced is not None:
        return replaced | ({"default": schema["default"]} if "default" in schema else {})
    if name in RANGES:
        branches = [branch | RANGES[name] if branch["type"] == "number" else branch for branch in schema["anyOf"]]
        return {**schema, "anyOf": branches}
    return schema
