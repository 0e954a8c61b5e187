"""The HTTP front door: OpenAI's API over bare ASGI, from the bytes of a request to the bytes of its answer."""
