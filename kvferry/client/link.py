"""What both Python clients need to speak to routers: channels, metadata, and failures in a person's words."""

from collections.abc import Sequence
from typing import Final

import grpc

from kvferry_rpc.common_pb2 import ErrorCode
from runtime.clock import SystemClock
from runtime.errors import KvferryError
from runtime.grpc_life import channel, channel_options
from runtime.tls import ChannelTls, TlsFiles

DEFAULT_TIMEOUT_S: Final = 600.0
QUICK_TIMEOUT_S: Final = 30.0
"""Of calls that compute nothing."""
# Within the cluster whoever cannot connect tries again at once. Here a router that is there but busy may need seconds
# to greet, and others are asked only after it.
_CONNECT_TIMEOUT_S: Final = 15.0

Metadata = tuple[tuple[str, str], ...]


def open_channels(addresses: Sequence[str], tls: TlsFiles | None) -> list[grpc.Channel]:
    """One synchronous channel an address. Raises OSError or ValueError for files that are no good."""
    options = channel_options(connect_timeout_s=_CONNECT_TIMEOUT_S)
    if tls is None:
        return [grpc.insecure_channel(address, options=options) for address in addresses]
    credentials = ChannelTls(tls, SystemClock()).credentials()
    return [grpc.secure_channel(address, credentials, options=options) for address in addresses]


def open_async_channels(addresses: Sequence[str], tls: TlsFiles | None) -> list[grpc.aio.Channel]:
    """The same for asyncio."""
    own_tls = ChannelTls(tls, SystemClock()) if tls else None
    return [channel(address, tls=own_tls, connect_timeout_s=_CONNECT_TIMEOUT_S) for address in addresses]


def key_metadata(api_key: str) -> Metadata:
    """What shows the API key; nothing without one."""
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def failure_of(error: grpc.RpcError, address: str) -> KvferryError:
    """What a failed call to the router at `address` means, with what to do where nothing is there."""
    failure = KvferryError.from_rpc(error, address)
    reason = failure.message.lower()
    if failure.code == ErrorCode.UNAVAILABLE and ("handshake" in reason or "ssl" in reason):
        return KvferryError(ErrorCode.UNAVAILABLE, f"no TLS connection with {failure.message}")
    if failure.code == ErrorCode.UNAVAILABLE and "connect" in reason:
        return KvferryError(
            ErrorCode.UNAVAILABLE, f"nothing answers at {address}: start a cluster with `kvferry up --model MODEL`"
        )
    return failure
