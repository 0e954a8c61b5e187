"""The pods of the local overlay, run without containers: same commands, same configuration files, same probes.
`tests/support/pod_commands.py` says what is put in the place of what."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.supervisor import free_run
from tests.support.live_cluster import TINY_REAL
from tests.support.manifests import Document, Pod, named, overlay, pod
from tests.support.pod_commands import HOST, command, configuration_on_host, mount_paths, on_host, variables

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ROLES = ("router", "prefill", "decode")
SECRET = "a secret of one test, long enough"
START_TIMEOUT_S = 240.0
ROUTER_PORTS = (8000, 8001, 8002)
WORKER_PORTS = (9000, 9001)


@dataclass
class HostPod:
    """A pod's volumes as directories, and its ports as others."""

    pod: Pod
    documents: tuple[Document, ...]
    directory: Path
    ports: Mapping[int, int]

    def fill_volumes(self) -> None:
        """A directory for each volume, with what the cluster would put there."""
        for volume in self.pod.spec["volumes"]:
            path = self._path(volume["name"])
            path.mkdir(parents=True, exist_ok=True)
            if "secret" in volume:
                for item in volume["secret"]["items"]:
                    (path / item["path"]).write_text(SECRET)
            if "configMap" in volume:
                for name, text in named(self.documents, "ConfigMap", volume["configMap"]["name"])["data"].items():
                    (path / name).write_text(configuration_on_host(text, self._mounts(self.pod.main), self.ports))

    async def run(self, container: Document) -> asyncio.subprocess.Process:
        """Start a container's process."""
        fields = {"POD_NAME": self.directory.name, "POD_IP": HOST}
        values = variables(container, self.documents, fields)
        # A path of the host already, which may lie below one that the container mounts, such as /tmp.
        given = values | ({"MODEL_SOURCE": "tiny-real"} if "MODEL_SOURCE" in values else {})
        words = [on_host(word, self._mounts(container)) for word in command(container, given)]
        python, *words = [str(TINY_REAL) if word == "tiny-real" else word for word in words]
        assert python == "python"
        environment = {**os.environ, **given, "PYTHONPATH": os.getcwd()}
        return await asyncio.create_subprocess_exec(
            sys.executable, *words, env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL
        )

    async def prepare(self) -> None:
        """Run the init containers to their end."""
        for container in self.pod.spec["initContainers"]:
            process = await self.run(container)
            assert await asyncio.wait_for(process.wait(), START_TIMEOUT_S) == 0, container["name"]

    async def passes(self, probe: str) -> bool:
        """Ask what the kubelet asks."""
        asked = self.pod.main[probe]
        if "grpc" in asked:
            async with grpc.aio.insecure_channel(f"{HOST}:{self.ports[asked['grpc']['port']]}") as channel:
                request = health_pb2.HealthCheckRequest(service=asked["grpc"].get("service", ""))
                try:
                    answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=asked["timeoutSeconds"])
                except grpc.aio.AioRpcError:
                    return False
                return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
        (number,) = [
            port["containerPort"] for port in self.pod.main["ports"] if port["name"] == asked["httpGet"]["port"]
        ]
        async with httpx.AsyncClient() as client:
            try:
                got = await client.get(f"http://{HOST}:{self.ports[number]}{asked['httpGet']['path']}")
            except httpx.TransportError:
                return False
            return got.is_success

    async def until(self, probe: str) -> None:
        """Ask again and again, as the kubelet does: there is nothing to wait on."""
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                if await self.passes(probe):
                    return
                await asyncio.sleep(0.1)

    def _mounts(self, container: Document) -> dict[str, Path]:
        return {path: self._path(name) for path, name in mount_paths(self.pod, container).items()}

    def _path(self, volume: str) -> Path:
        # One cache for all: what is prepared in it is the same for each.
        return (self.directory.parent if volume == "cache" else self.directory) / volume


@asynccontextmanager
async def _running(host_pod: HostPod) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await host_pod.run(host_pod.pod.main)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _host_pods(tmp_path: Path) -> dict[str, HostPod]:
    documents = overlay("local-cpu")
    numbers = iter(range(free_run(HOST, 7), 65536))
    router_ports = {port: next(numbers) for port in ROUTER_PORTS}
    found = {}
    for role in ROLES:
        ports = router_ports if role == "router" else router_ports | {port: next(numbers) for port in WORKER_PORTS}
        found[role] = HostPod(pod(documents, role), documents, tmp_path / f"kvferry-{role}-0", ports)
        found[role].fill_volumes()
    return found


async def _complete(router: HostPod) -> dict[str, Any]:
    body = {
        "model": named(router.documents, "ConfigMap", _model_map(router))["data"]["name"],
        "prompt": "Once upon a time there was a little girl who liked to walk in the woods", "max_tokens": 8,
        "temperature": 0, "kv_receipt": True,
    }  # fmt: skip
    async with httpx.AsyncClient(timeout=60) as client:
        answer = await client.post(f"http://{HOST}:{router.ports[8000]}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def _model_map(router: HostPod) -> str:
    (name,) = {entry["valueFrom"]["configMapKeyRef"]["name"] for entry in router.pod.main["env"]}
    return str(name)


async def test_the_pods_of_the_local_overlay_serve_a_request_and_end_as_they_are_told(tmp_path: Path) -> None:
    host_pods = _host_pods(tmp_path)
    first, *others = host_pods.values()
    for other in others:
        assert other.pod.spec["initContainers"] == first.pod.spec["initContainers"]
    await first.prepare()
    async with AsyncExitStack() as stack:
        # All at the same time, as a cluster starts them: they find each other.
        processes = {role: await stack.enter_async_context(_running(each)) for role, each in host_pods.items()}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            await asyncio.gather(*(each.until(probe) for each in host_pods.values()))
        # The router is ready when a decode worker is, which may be before the prefill worker has found it; but that one
        # was ready too, and workers are so when their routers know them.
        answer = await _complete(host_pods["router"])
        receipt = answer["kv_receipt"]
        assert receipt["prefill_worker"] == "kvferry-prefill-0"
        assert receipt["decode_worker"] == "kvferry-decode-0"
        assert receipt["transport"] == "tcp"
        program, _ = host_pods["router"].pod.main["lifecycle"]["preStop"]["exec"]["command"]
        # It waits for ten seconds: here only for as long as it takes to find out that it can.
        waits = await asyncio.create_subprocess_exec(program, "0")
        assert await waits.wait() == 0
        for role in ROLES:
            processes[role].send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(processes[role].wait(), START_TIMEOUT_S) == 0, role
