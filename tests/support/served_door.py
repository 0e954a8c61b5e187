"""A door on a real socket, for the official clients, and scripts in the vocabulary of a model with tools."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai

from router.http.protocol import HttpServer
from tests.support.http_door import Door
from tests.support.scripted_source import Finish, Script
from tests.support.tool_templates import tokenizer_of, tool_door


def writes(text: str, style: str = "hermes", **finish: Any) -> Script:
    """A script that emits `text` token by token, for a model of this style."""
    tokenizer = tokenizer_of(style)
    return lambda _: [*([token] for token in tokenizer.encode(text, add_special_tokens=False)), Finish(**finish)]


def writing_door(text: str, style: str = "hermes", **options: Any) -> Door:
    """A door to a model of this style that answers with `text`."""
    return tool_door(writes(text, style), style, **options)


@asynccontextmanager
async def served(door: Door) -> AsyncIterator[str]:
    """The URL of the door on a free port."""
    server = HttpServer(door.app, host="127.0.0.1", port=0)
    await server.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        await server.close(grace_s=1)


@asynccontextmanager
async def openai_client(door: Door) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's own client of this door."""
    async with (
        served(door) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@asynccontextmanager
async def anthropic_client(door: Door, key: str = "none") -> AsyncIterator[anthropic.AsyncAnthropic]:
    """Anthropic's own client of this door."""
    async with served(door) as url, anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as client:
        yield client
