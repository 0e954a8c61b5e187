"""From the fields of a body to the Grammar that workers enforce; there are OpenAI's names for it and vLLM's."""

from kvferry_rpc.common_pb2 import Grammar
from router.http.openai_requests import (
    ChatBody,
    GenerationBody,
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponseFormat,
    StructuredOutputs,
)
from runtime.errors import invalid
from runtime.grammar_limits import schema_text


def grammar_of(body: GenerationBody) -> Grammar | None:
    """The grammar that a body asks for; None for any text. Its bounds are checked later, by `runtime.limits`.

    Raises KvferryError (INVALID_REQUEST) naming the field when two are asked for, or a schema is not text.
    """
    by_format = _of_format(body.response_format) if isinstance(body, ChatBody) else None
    by_vendor_field = _of_structured_outputs(body.structured_outputs)
    if by_format is not None and by_vendor_field is not None:
        raise invalid("structured_outputs", "and response_format exclude each other")
    return by_format or by_vendor_field


def _of_format(asked: ResponseFormat | None) -> Grammar | None:
    if isinstance(asked, JsonObjectFormat):
        return Grammar(kind=Grammar.JSON_OBJECT, field="response_format")
    if isinstance(asked, JsonSchemaFormat):
        field = "response_format.json_schema.schema"
        return Grammar(kind=Grammar.JSON_SCHEMA, text=schema_text(field, asked.json_schema.schema), field=field)
    return None


def _of_structured_outputs(asked: StructuredOutputs | None) -> Grammar | None:
    if asked is None:
        return None
    found: list[Grammar] = []
    if asked.json is not None:
        field = "structured_outputs.json"
        found.append(Grammar(kind=Grammar.JSON_SCHEMA, text=schema_text(field, asked.json), field=field))
    if asked.json_object:
        found.append(Grammar(kind=Grammar.JSON_OBJECT, field="structured_outputs.json_object"))
    if asked.regex is not None:
        found.append(Grammar(kind=Grammar.REGEX, text=asked.regex, field="structured_outputs.regex"))
    if asked.grammar is not None:
        found.append(Grammar(kind=Grammar.EBNF, text=asked.grammar, field="structured_outputs.grammar"))
    if len(found) != 1:
        raise invalid("structured_outputs", "must have exactly one of json, json_object, regex and grammar")
    return found[0]
