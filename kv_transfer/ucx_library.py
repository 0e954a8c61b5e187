"""UCX's library: what has to be set before it is loaded, the loading itself, and the few C functions that are used.

The library comes with `ucxx-cu12` or `ucxx-cu13`, or is the system's, or nixl's where that is installed: a process
must have one UCX only. Each replaces mmap and munmap for itself, and the one that was there first then no longer hears
of memory that goes: its next context has no cache of registrations, and crashes the process over a peer that dies in
the middle of a rendezvous (tried with 1.21 beside nixl's 1.23).

UCXX's own classes are not used, because a link must be able to end for certain (tried with 0.52): a request cancelled
in mid-transfer keeps its worker alive for ever, and with it the right to write into memory; an endpoint's `close` never
ends while the other side is stopped; a request cannot be cancelled by itself; and its contexts are not made for workers
on several threads. UCX's C interface, which is public and stable since 1.0, has none of these limits: after
`ucp_worker_destroy` nothing moves.
"""

import ctypes
import importlib
import importlib.util
import logging
import os
from dataclasses import dataclass
from typing import Any

from kv_transfer.interfaces import set_unless_set, ucx_devices, ucx_settings
from kv_transfer.nixl_library import bundled_ucx

OK, IN_PROGRESS, BUSY = 0, 1, -15
HOST_MEMORY, CUDA_MEMORY = 0, 1

_SONAMES = ("libucp.so.0", "libucs.so.0")
_WHEEL = "libucx"  # Of libucx-cu12 or libucx-cu13, on which ucxx depends.
_OLDEST = (1, 15)
_MISSING = "transport ucx needs the library of UCX: pip install 'kvferry[ucx]'"

_FIRST_ERROR_POINTER = 2**64 - 100
_MAX_LANES = 16

_log = logging.getLogger(__name__)


class UcxError(Exception):
    """UCX refused or failed."""


class ContextParams(ctypes.Structure):
    """ucp_params_t, as far as it is used: fields that the mask does not name are not read."""

    FEATURES, MT_WORKERS_SHARED = 1 << 0, 1 << 5
    TAG, WAKEUP = 1 << 0, 1 << 4
    _fields_ = [
        ("field_mask", ctypes.c_uint64),
        ("features", ctypes.c_uint64),
        ("request_size", ctypes.c_size_t),
        ("request_init", ctypes.c_void_p),
        ("request_cleanup", ctypes.c_void_p),
        ("tag_sender_mask", ctypes.c_uint64),
        ("mt_workers_shared", ctypes.c_int),
        ("unused", ctypes.c_uint64 * 16),
    ]


class WorkerParams(ctypes.Structure):
    """ucp_worker_params_t, as far as it is used."""

    THREAD_MODE, SERIALIZED = 1 << 0, 1
    _fields_ = [("field_mask", ctypes.c_uint64), ("thread_mode", ctypes.c_int), ("unused", ctypes.c_uint64 * 64)]


class EndpointParams(ctypes.Structure):
    """ucp_ep_params_t, as far as it is used."""

    REMOTE_ADDRESS, ERROR_MODE, ERROR_HANDLER, ERROR_MODE_PEER = 1 << 0, 1 << 1, 1 << 2, 1
    _fields_ = [
        ("field_mask", ctypes.c_uint64),
        ("address", ctypes.c_char_p),
        ("error_mode", ctypes.c_int),
        ("error_callback", ctypes.c_void_p),
        ("error_argument", ctypes.c_void_p),
        ("unused", ctypes.c_uint64 * 16),
    ]


class RequestParams(ctypes.Structure):
    """ucp_request_param_t. Without a datatype, a buffer is so many bytes."""

    FLAGS, MEMORY_TYPE, ALWAYS_A_REQUEST, FORCE = 1 << 4, 1 << 6, 1 << 16, 1
    _fields_ = [
        ("mask", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("request", ctypes.c_void_p),
        ("callback", ctypes.c_void_p),
        ("datatype", ctypes.c_uint64),
        ("user_data", ctypes.c_void_p),
        ("reply_buffer", ctypes.c_void_p),
        ("memory_type", ctypes.c_int),
        ("unused", ctypes.c_uint64 * 4),
    ]


class ReceiveInfo(ctypes.Structure):
    """ucp_tag_recv_info_t: what came in."""

    _fields_ = [("tag", ctypes.c_uint64), ("size_bytes", ctypes.c_size_t)]


class Lane(ctypes.Structure):
    """ucp_transport_entry_t."""

    _fields_ = [("transport", ctypes.c_char_p), ("device", ctypes.c_char_p)]


class EndpointFacts(ctypes.Structure):
    """ucp_ep_attr_t, with the ucp_transports_t in it."""

    TRANSPORTS = 1 << 3
    _fields_ = [
        ("field_mask", ctypes.c_uint64),
        ("name_and_addresses", ctypes.c_byte * (32 + 2 * 128)),
        ("lanes", ctypes.POINTER(Lane)),
        ("num_lanes", ctypes.c_uint),
        ("lane_bytes", ctypes.c_size_t),
        ("user_data", ctypes.c_void_p),
    ]


ErrorCallback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)

_handle, _out = ctypes.c_void_p, ctypes.c_void_p
# Result and arguments. Those of the first table may take their time, so other Python threads run meanwhile; those of
# the second are over at once, and to let go of the interpreter would cost more: a busy thread gives it back late.
_SLOW: dict[str, tuple[Any, list[Any]]] = {
    "ucp_init_version": (ctypes.c_int, [ctypes.c_uint, ctypes.c_uint, _out, _handle, _out]),
    "ucp_cleanup": (None, [_handle]),
    "ucp_worker_create": (ctypes.c_int, [_handle, _out, _out]),
    "ucp_worker_destroy": (None, [_handle]),
    "ucp_worker_progress": (ctypes.c_uint, [_handle]),
    "ucp_ep_create": (ctypes.c_int, [_handle, _out, _out]),
    "ucp_ep_close_nbx": (_handle, [_handle, _out]),
}
_QUICK: dict[str, tuple[Any, list[Any]]] = {
    "ucp_get_version": (None, [_out, _out, _out]),
    "ucp_config_read": (ctypes.c_int, [ctypes.c_char_p, ctypes.c_char_p, _out]),
    "ucp_config_modify": (ctypes.c_int, [_handle, ctypes.c_char_p, ctypes.c_char_p]),
    "ucp_config_release": (None, [_handle]),
    "ucp_worker_get_address": (ctypes.c_int, [_handle, _out, _out]),
    "ucp_worker_release_address": (None, [_handle, _handle]),
    "ucp_worker_get_efd": (ctypes.c_int, [_handle, _out]),
    "ucp_worker_arm": (ctypes.c_int, [_handle]),
    "ucp_ep_query": (ctypes.c_int, [_handle, _out]),
    "ucp_ep_flush_nbx": (_handle, [_handle, _out]),
    "ucp_tag_send_nbx": (_handle, [_handle, _handle, ctypes.c_size_t, ctypes.c_uint64, _out]),
    "ucp_tag_recv_nbx": (_handle, [_handle, _handle, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_uint64, _out]),
    "ucp_request_check_status": (ctypes.c_int, [_handle]),
    "ucp_tag_recv_request_test": (ctypes.c_int, [_handle, _out]),
    "ucp_request_cancel": (None, [_handle, _handle]),
    "ucp_request_free": (None, [_handle]),
}


class UcxLibrary:
    """The loaded library. `c` holds its functions by their names."""

    def __init__(self) -> None:
        """Load it. Raises ValueError when it is missing or too old."""
        set_unless_set(ucx_settings())
        slow, quick, status_text = _load()
        functions: dict[str, Any] = {}
        for table, library in ((_SLOW, slow), (_QUICK, quick)):
            for name, (result, arguments) in table.items():
                functions[name] = library[name]
                functions[name].restype, functions[name].argtypes = result, arguments
        self.c = _Functions(functions)
        self._text = status_text
        self._text.restype = ctypes.c_char_p
        numbers = [ctypes.c_uint() for _ in range(3)]
        self.c.ucp_get_version(*(ctypes.addressof(number) for number in numbers))
        self.version = (numbers[0].value, numbers[1].value)
        if self.version < _OLDEST:
            raise ValueError(f"transport ucx needs UCX {_OLDEST[0]}.{_OLDEST[1]}, this is {self.version}: {_MISSING}")
        _log.info("UCX %d.%d.%d", *(number.value for number in numbers))

    def why(self, status: int) -> str:
        """A status in words."""
        text: bytes = self._text(status)
        return text.decode()

    def check(self, status: int) -> None:
        """Raises UcxError unless the status is OK."""
        if status != OK:
            raise UcxError(self.why(status))

    def request(self, pointer: int | None) -> int | None:
        """What a call that begins something answered: a request to wait for, or None when it was over at once.

        Raises UcxError when it could not be begun.
        """
        if pointer is not None and pointer >= _FIRST_ERROR_POINTER:
            raise UcxError(self.why(pointer - 2**64))
        return pointer


@dataclass(frozen=True, slots=True)
class _Functions:
    """Attribute access to the functions of C."""

    by_name: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        return self.by_name[name]


class UcxContext:
    """What a process has of UCX: one, for all its links. Any thread."""

    def __init__(self, library: UcxLibrary, bind_host: str) -> None:
        """With the network devices of the interface that has `bind_host`, unless UCX_NET_DEVICES is set.

        Raises UcxError.
        """
        self.library = library
        self.devices = os.environ.get("UCX_NET_DEVICES", "") or ucx_devices(bind_host) or "all"
        c, config, handle = library.c, ctypes.c_void_p(), ctypes.c_void_p()
        library.check(c.ucp_config_read(None, None, ctypes.addressof(config)))
        try:
            library.check(c.ucp_config_modify(config, b"NET_DEVICES", self.devices.encode()))
            params = ContextParams(
                field_mask=ContextParams.FEATURES | ContextParams.MT_WORKERS_SHARED,
                features=ContextParams.TAG | ContextParams.WAKEUP,
                mt_workers_shared=1,
            )
            arguments = ctypes.addressof(params), config, ctypes.addressof(handle)
            library.check(c.ucp_init_version(*library.version, *arguments))
        finally:
            c.ucp_config_release(config)
        self.handle: int | None = handle.value
        _log.info("UCX may use the network devices %s", self.devices)

    def close(self) -> None:
        """Idempotent. After the last worker."""
        handle, self.handle = self.handle, None
        if handle is not None:
            self.library.c.ucp_cleanup(handle)


def lanes_of(library: UcxLibrary, endpoint: int) -> str:
    """What UCX chose for an endpoint, as "tcp/eth0" or "rc_mlx5/mlx5_0:1,cuda_ipc/cuda"; empty if it does not say."""
    lanes = (Lane * _MAX_LANES)()
    facts = EndpointFacts(field_mask=EndpointFacts.TRANSPORTS, num_lanes=_MAX_LANES, lane_bytes=ctypes.sizeof(Lane))
    facts.lanes = ctypes.cast(lanes, ctypes.POINTER(Lane))
    if library.c.ucp_ep_query(endpoint, ctypes.addressof(facts)) != OK:
        return ""
    names = [f"{lane.transport.decode()}/{lane.device.decode()}" for lane in lanes[: facts.num_lanes]]
    return ",".join(dict.fromkeys(names))


def _load() -> tuple[ctypes.CDLL, ctypes.PyDLL, Any]:
    """The library twice, with and without letting go of the interpreter during a call; `ucs_status_string`.

    Raises ValueError.
    """
    names = _names()
    try:
        return ctypes.CDLL(names[0]), ctypes.PyDLL(names[0]), ctypes.PyDLL(names[1])["ucs_status_string"]
    except OSError as error:
        raise ValueError(f"{_MISSING} ({error})") from error


def _names() -> tuple[str, str]:
    """What to load as libucp and libucs."""
    bundled = bundled_ucx()
    if bundled is not None:
        _log.info("UCX is the one of nixl: %s", bundled[0])
        return str(bundled[0]), str(bundled[1])
    if importlib.util.find_spec(_WHEEL) is not None:
        # It loads its own, or the system's if RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY is set; then the name means that one.
        importlib.import_module(_WHEEL).load_library()
    return _SONAMES
