"""Whether a worker that registers makes sense, and goes with those that are attached already."""

from kv_cache.layout import KVCacheLayout, LayoutVerdict
from kv_transfer.convert import layout_refusal
from kvferry_rpc.internal_pb2 import Register, Role
from runtime.errors import invalid
from runtime.protocol_version import CONTROL_VERSION, ProtocolVersion

_MAX_WORKER_ID_CHARS = 128
_INCARNATION_BYTES = 16


def refusal_between(register: Register, layout: KVCacheLayout, other: Register, other_layout: KVCacheLayout) -> str:
    """Why a worker does not go with one that is attached; empty if it does.

    What a prefill worker computes must fit every decode worker, be it after a conversion. Two of one role never
    exchange blocks, but must be of one model.
    """
    if register.role != other.role:
        prefill_first = register.role == Role.PREFILL
        return layout_refusal(*((layout, other_layout) if prefill_first else (other_layout, layout)))
    match = layout.compare(other_layout)
    return str(match) if match.verdict is LayoutVerdict.REFUSED else ""


def check_registration(register: Register) -> KVCacheLayout:
    """The layout of a sane registration. Raises KvferryError (INVALID_REQUEST) naming the field."""
    theirs = ProtocolVersion(register.protocol_version, register.protocol_minor)
    if refusal := CONTROL_VERSION.refusal(theirs, "the protocol between routers and workers"):
        raise invalid("protocol_version", refusal)
    if not 1 <= len(register.worker_id) <= _MAX_WORKER_ID_CHARS or not register.worker_id.isprintable():
        raise invalid("worker_id", f"must be 1 to {_MAX_WORKER_ID_CHARS} printable characters")
    if len(register.incarnation) != _INCARNATION_BYTES:
        raise invalid("incarnation", f"must have {_INCARNATION_BYTES} bytes, not {len(register.incarnation)}")
    if register.role not in (Role.PREFILL, Role.DECODE):
        raise invalid("role", "must be PREFILL or DECODE")
    for field in ("address", "num_blocks", "max_context_tokens", "vocab_size"):
        if not getattr(register, field):
            raise invalid(field, "must be set")
    try:
        return KVCacheLayout.from_proto(register.layout)
    except ValueError as error:
        raise invalid("layout", f"makes no sense: {error}") from error
