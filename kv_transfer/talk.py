"""The messages of one greeting: bounded in size, all of them under one deadline."""

import time

from kv_transfer.messages import MAX_GREETING_BYTES, MAX_REASON_CHARACTERS, Goodbye, Greeting, Message
from kv_transfer.transport import Channel, LinkError
from kv_transfer.wire import decode_greeting, encode


class GreetingRefused(LinkError):
    """One end will not deal with the other; `code` says of what kind the reason is."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Talk:
    """One end of a greeting. Used by one thread."""

    def __init__(self, channel: Channel, timeout_s: float) -> None:
        self.channel = channel
        self._deadline = time.monotonic() + timeout_s

    def say(self, message: Message) -> None:
        """Send. Raises LinkError."""
        self.channel.send(encode(message), (), self._left_s())

    def hear(self) -> Greeting:
        """Wait for the next message. Raises LinkError; GreetingRefused if it is a Goodbye."""
        data, _ = self.channel.receive(
            max_message_bytes=MAX_GREETING_BYTES, max_payload_bytes=0, timeout_s=self._left_s()
        )
        message = decode_greeting(data)
        if isinstance(message, Goodbye):
            raise GreetingRefused(message.code, f"the peer refused the link: {message.reason[:MAX_REASON_CHARACTERS]}")
        return message

    def _left_s(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise LinkError("the greeting took too long")
        return left
