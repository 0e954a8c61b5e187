"""kvferry: the front door (command line, local launcher, Python client).

`from kvferry import Client` and its like work without this package importing them before: `import kvferry` stays quick.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvferry.client import AsyncClient, Client
    from kvferry.client.retry import ONE_TRY, RetryPolicy
    from kvferry.client.types import (
        ChatAnswer,
        Completion,
        Ebnf,
        Finished,
        JsonObject,
        JsonSchema,
        Message,
        ReasoningDelta,
        Regex,
        TextDelta,
        Tool,
        ToolCall,
        ToolCallArguments,
        ToolCallStart,
    )
    from runtime.errors import ErrorCode, KvferryError
    from runtime.tls import TlsFiles

__all__ = [
    "ONE_TRY",
    "AsyncClient",
    "ChatAnswer",
    "Client",
    "Completion",
    "Ebnf",
    "ErrorCode",
    "Finished",
    "JsonObject",
    "JsonSchema",
    "KvferryError",
    "Message",
    "ReasoningDelta",
    "Regex",
    "RetryPolicy",
    "TextDelta",
    "TlsFiles",
    "Tool",
    "ToolCall",
    "ToolCallArguments",
    "ToolCallStart",
]

__version__ = "0.1.0"

_ELSEWHERE = {
    "AsyncClient": "kvferry.client",
    "Client": "kvferry.client",
    "ErrorCode": "runtime.errors",
    "KvferryError": "runtime.errors",
    "ONE_TRY": "kvferry.client.retry",
    "RetryPolicy": "kvferry.client.retry",
    "TlsFiles": "runtime.tls",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for, the first time that it is."""
    if name not in __all__:
        raise AttributeError(f"module 'kvferry' has no attribute {name!r}")
    value = getattr(importlib.import_module(_ELSEWHERE.get(name, "kvferry.client.types")), name)
    globals()[name] = value
    return value
