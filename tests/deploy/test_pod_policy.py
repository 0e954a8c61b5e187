"""What must hold of every pod, whoever adds one."""

import re
from collections.abc import Iterator

from kvferry import __version__
from tests.support.manifests import K8S, OVERLAYS, Document, Pod, overlay, pods, render

ALLOWED_CAPABILITIES = {"rdma-gpu": ["IPC_LOCK"]}
LOADING_S = 600


def _all_pods() -> Iterator[tuple[str, Pod]]:
    for name in OVERLAYS:
        for pod in pods(overlay(name)):
            yield name, pod
    for pod in pods(render(K8S / "kuberay")):
        yield "kuberay", pod


def _containers() -> Iterator[tuple[str, Pod, Document]]:
    for name, pod in _all_pods():
        for container in pod.all_containers:
            yield name, pod, container


def test_every_container_has_limits_and_requests_below_them() -> None:
    for name, pod, container in _containers():
        limits, requests = container["resources"]["limits"], container["resources"]["requests"]
        where = f"{name}: {pod.owner} {container['name']}"
        assert {"cpu", "memory"} <= limits.keys(), where
        assert {"cpu", "memory"} <= requests.keys(), where
        for resource, amount in requests.items():
            assert _amount(amount) <= _amount(limits[resource]), f"{where}: {resource}"
        for resource in limits.keys() - {"cpu", "memory"}:
            assert limits[resource] == requests[resource], f"{where}: {resource} cannot be overcommitted"


def test_every_container_is_confined() -> None:
    for name, pod, container in _containers():
        where = f"{name}: {pod.owner} {container['name']}"
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False, where
        assert context["readOnlyRootFilesystem"] is True, where
        assert context["capabilities"]["drop"] == ["ALL"], where
        added = context["capabilities"].get("add", [])
        assert added == (ALLOWED_CAPABILITIES.get(name, []) if added else []), where
        assert not context.get("privileged"), where


def test_every_pod_runs_as_nobody_in_particular_and_with_the_usual_system_calls() -> None:
    for name, pod in _all_pods():
        context = pod.spec["securityContext"]
        assert context["runAsNonRoot"] is True, f"{name}: {pod.owner}"
        assert context["runAsUser"] >= 10000, f"{name}: {pod.owner}"
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, f"{name}: {pod.owner}"
        assert pod.spec["automountServiceAccountToken"] is False, f"{name}: {pod.owner}"
        assert not {"hostNetwork", "hostPID", "hostIPC"} & {key for key, on in pod.spec.items() if on}
        assert not any("hostPath" in volume for volume in pod.spec["volumes"]), f"{name}: {pod.owner}"


def test_every_container_that_runs_on_has_all_three_probes_and_time_to_load() -> None:
    for name, pod in _all_pods():
        for container in pod.containers:
            where = f"{name}: {pod.owner} {container['name']}"
            startup, liveness = container["startupProbe"], container["livenessProbe"]
            assert startup["periodSeconds"] * startup["failureThreshold"] >= LOADING_S, where
            assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 30, f"{where}: killed when only busy"
            assert "readinessProbe" in container, where


def test_liveness_does_not_ask_what_depends_on_others() -> None:
    for name in OVERLAYS:
        for pod in pods(overlay(name)):
            if _role(pod) == "router":
                assert pod.main["livenessProbe"]["httpGet"]["path"] == "/health"
                assert pod.main["readinessProbe"]["httpGet"]["path"] == "/ready"
            else:
                # "" turns NOT_SERVING with the routers' acceptance; `live` only with the process.
                assert pod.main["livenessProbe"]["grpc"]["service"] == "live"
                assert pod.main["startupProbe"]["grpc"]["service"] == "live"
                assert "service" not in pod.main["readinessProbe"]["grpc"]


def test_what_a_service_sends_clients_to_waits_before_it_drains() -> None:
    for name in OVERLAYS:
        for pod in pods(overlay(name)):
            assert ("lifecycle" in pod.main) == (_role(pod) == "router"), f"{name}: {pod.owner}"


def test_images_have_the_tag_of_this_version() -> None:
    for name, pod, container in _containers():
        image, _, tag = container["image"].partition(":")
        assert tag == __version__, f"{name}: {pod.owner}: {image}:{tag}"


def test_shared_memory_is_sized_and_counted_into_the_limit() -> None:
    for name, pod in _all_pods():
        if name != "kuberay" and _role(pod) == "router":
            continue
        (mount,) = [mount for mount in pod.main["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
        (volume,) = [volume for volume in pod.spec["volumes"] if volume["name"] == mount["name"]]
        size = volume["emptyDir"]["sizeLimit"]
        assert volume["emptyDir"]["medium"] == "Memory"
        assert 64 * 1024**2 < _amount(size) <= _amount(pod.main["resources"]["limits"]["memory"]) / 2, name


def test_every_other_volume_that_can_grow_has_a_bound() -> None:
    for name, pod in _all_pods():
        for volume in pod.spec["volumes"]:
            # Huge pages are bounded by the container's limit of them.
            if "emptyDir" in volume and volume["emptyDir"].get("medium") != "HugePages-2Mi":
                assert "sizeLimit" in volume["emptyDir"], f"{name}: {pod.owner} {volume['name']}"


def test_secrets_are_files_and_never_part_of_a_manifest() -> None:
    for name in OVERLAYS:
        assert not any(document["kind"] == "Secret" for document in overlay(name))
    for name, pod, container in _containers():
        for entry in container.get("env", ()):
            assert "secretKeyRef" not in entry.get("valueFrom", {}), f"{name}: {pod.owner}"


def test_pods_of_a_role_are_spread_over_nodes() -> None:
    for name in OVERLAYS:
        for pod in pods(overlay(name)):
            if pod.owner.startswith("LeaderWorkerSet"):
                continue  # Its groups have nodes of their own.
            (spread,) = pod.spec["topologySpreadConstraints"]
            assert spread["topologyKey"] == "kubernetes.io/hostname"
            assert spread["labelSelector"]["matchLabels"].items() <= pod.labels.items(), f"{name}: {pod.owner}"


def test_with_tls_the_kubelet_asks_in_a_way_that_it_can(with_everything: tuple[Document, ...]) -> None:
    for pod in pods(with_everything):
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            probe = pod.main[kind]
            assert "grpc" not in probe, "the kubelet speaks no TLS there"
            assert probe["httpGet"]["scheme"] == "HTTPS" if _role(pod) == "router" else "tcpSocket" in probe


def _role(pod: Pod) -> str:
    return pod.labels["app.kubernetes.io/name"].removeprefix("kvferry-")


def _amount(text: str) -> float:
    match = re.fullmatch(r"([0-9.]+)(m|Mi|Gi)?", text)
    assert match is not None, text
    return float(match[1]) * {None: 1.0, "m": 1e-3, "Mi": 1024.0**2, "Gi": 1024.0**3}[match[2]]
