"""The Python client of the public gRPC service: `Client`, and `AsyncClient` for asyncio."""

from kvferry.client.asynchronous import AsyncClient
from kvferry.client.blocking import Client
from kvferry.client.link import DEFAULT_TIMEOUT_S
from kvferry.client.requests import chat_request, text_request
from kvferry.client.retry import ONE_TRY, RetryPolicy

__all__ = ["DEFAULT_TIMEOUT_S", "ONE_TRY", "AsyncClient", "Client", "RetryPolicy", "chat_request", "text_request"]
