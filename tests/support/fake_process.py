"""Stands in for a router or worker: speaks the launcher's protocol, computes nothing.

`python fake_process.py ROLE BEHAVIOUR [the flags of the real process]`; see BEHAVIOURS for what it can be told to do.
"""

import json
import os
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BEHAVIOURS = (
    "good",
    "dies-at-start",
    "hangs",
    "ignores-sigterm",
    "dies-when-ready",
    "chatters",
    "never-serves",
    "fails-second-start",
)
RECOMPUTED_PROMPT = "recompute"


def main() -> int:
    role, behaviour, *flags = sys.argv[1:]
    assert behaviour in BEHAVIOURS
    if behaviour == "dies-at-start" or (behaviour == "fails-second-start" and _started_before(role)):
        sys.stderr.write("no memory for the pool\n")
        return 3
    ended = threading.Event()
    if behaviour == "ignores-sigterm":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: ended.set())
        threading.Thread(target=_watch_stdin, args=(ended,), daemon=True).start()
    sys.stderr.write(f"{role} starts\n")
    sys.stdout.write("not the ready line\n")
    if behaviour == "hangs":
        sys.stdout.flush()
        ended.wait()
        return 0
    facts: dict[str, Any] = {"ready": True, "role": role, "pid": os.getpid(), "flags": flags}
    facts["omp"] = [os.environ.get("OMP_NUM_THREADS"), os.environ.get("OMP_WAIT_POLICY")]
    if role == "router":
        facts.update(_serve_router(serving=behaviour != "never-serves"))
    else:
        facts.update(address="127.0.0.1:1", num_blocks=64, transports=["shm", "tcp"])
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()
    if behaviour == "dies-when-ready":
        return 4
    if behaviour == "chatters":
        for _ in range(400):
            os.write(1, b"chatter\n" * 500)  # 4,000 bytes: a pipe takes them whole or not at all
    while not ended.wait(60):
        pass
    return 0


def _started_before(role: str) -> bool:
    marker = f"started-{role}"  # in the working directory, which is the cluster's own
    if os.path.exists(marker):
        return True
    with open(marker, "w"):
        return False


def _watch_stdin(ended: threading.Event) -> None:
    while os.read(0, 1024):
        pass
    ended.set()


def _serve_router(*, serving: bool) -> dict[str, int]:
    class Ready(BaseHTTPRequestHandler):
        asked = 0

        def do_GET(self) -> None:
            Ready.asked += 1
            good = serving and Ready.asked > 1 and self.path == "/ready"
            self.send_response(200 if good else 503)
            self.end_headers()
            self.wfile.write(b"ready" if good else b"no decode worker yet")

        def log_message(self, *_: Any) -> None: ...

    http_server = ThreadingHTTPServer(("127.0.0.1", 0), Ready)
    threading.Thread(target=http_server.serve_forever, daemon=True).start()
    return {"http_port": http_server.server_port, "grpc_port": _serve_grpc(), "internal_port": 1}


def _serve_grpc() -> int:
    """The public service with canned answers: it echoes the prompt word by word."""
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    from kvferry_rpc import common_pb2, public_pb2, public_pb2_grpc

    def receipt(prompt: str) -> common_pb2.KVReceipt:
        return common_pb2.KVReceipt(
            request_id="req-1", handoff_id="h-1", attempt=1, prefill_worker="prefill-0", decode_worker="decode-0",
            transport="shm", prompt_tokens=9, tokens_recomputed=9 if RECOMPUTED_PROMPT in prompt else 0,
            blocks_sent=1, bytes_sent=4096, checksum_verified=True, checksum=b"\x01\x02", transfer_ms=2.0,
            exposed_transfer_ms=0.5,
        )  # fmt: skip

    class Service(public_pb2_grpc.KvferryServicer):
        def Generate(self, request: Any, context: Any) -> Any:
            prompt = request.text or request.chat.messages[-1].content
            if request.sampling.temperature > 2:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "temperature must be in [0, 2]")
            words = prompt.split()
            turns = len(request.chat.messages)
            words.append(f"(messages {turns}, seed {request.sampling.seed if request.has_seed else 'none'})")
            for word in words:
                yield public_pb2.GenerateResponse(request_id="req-1", text=word + " ")
            finish = public_pb2.Finish(
                reason=common_pb2.STOP, prompt_tokens=9, completion_tokens=len(words), receipt=receipt(prompt)
            )
            yield public_pb2.GenerateResponse(request_id="req-1", finish=finish)

        def ListModels(self, request: Any, context: Any) -> Any:
            return public_pb2.ListModelsResponse(models=[public_pb2.Model(id="fake", max_context_tokens=128)])

        def ClusterState(self, request: Any, context: Any) -> Any:
            worker = public_pb2.WorkerState(
                worker_id="decode-0", role="decode", state="ready", pid=7, address="127.0.0.1:1", blocks_total=64,
                blocks_free=60, blocks_cached=4,
            )  # fmt: skip
            return public_pb2.ClusterStateResponse(
                model="fake", workers=[worker], requests_in_flight=3, requests_queued=1, router_id="r-1"
            )

        def GetReceipt(self, request: Any, context: Any) -> Any:
            if request.request_id != "req-1":
                context.abort(grpc.StatusCode.NOT_FOUND, f"no receipt of {request.request_id!r} is kept")
            return receipt("")

    server = grpc.server(ThreadPoolExecutor(4))
    public_pb2_grpc.add_KvferryServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    _servers.append(server)
    return port


_servers: list[Any] = []

if __name__ == "__main__":
    # _exit: no thread of the fake may delay the end.
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
