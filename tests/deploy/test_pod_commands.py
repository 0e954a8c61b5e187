"""The command lines and configuration files inside the manifests are ones that the processes take."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from decode_worker.config import DecodeConfig
from prefill_worker.config import PrefillConfig
from router.config import RouterConfig
from runtime.config import parse_config
from tests.support.manifests import OVERLAYS, Document, Pod, named, overlay, pods
from tests.support.pod_commands import command, mount_paths, on_host, variables

CONFIGS: dict[str, type[Any]] = {
    "router": RouterConfig,
    "prefill_worker": PrefillConfig,
    "decode_worker": DecodeConfig,
}
FIELDS = {"POD_NAME": "kvferry-x-0", "POD_IP": "10.0.0.7"}


@pytest.fixture(params=[*OVERLAYS, "local-cpu with everything"])
def documents(request: pytest.FixtureRequest, with_everything: tuple[Document, ...]) -> tuple[Document, ...]:
    return overlay(request.param) if request.param in OVERLAYS else with_everything


def _config(pod: Pod, documents: tuple[Document, ...], tmp_path: Path) -> Any:
    """What the process of a pod makes of its command line, with its ConfigMaps in files."""
    (path,) = [path for path, name in mount_paths(pod, pod.main).items() if name == "config"]
    (volume,) = [volume for volume in pod.spec["volumes"] if volume["name"] == "config"]
    directory = tmp_path / pod.main["name"]
    directory.mkdir()
    for name, text in named(documents, "ConfigMap", volume["configMap"]["name"])["data"].items():
        (directory / name).write_text(text)
    python, dash_m, module, *arguments = command(pod.main, variables(pod.main, documents, FIELDS))
    assert (python, dash_m) == ("python", "-m")
    return parse_config(CONFIGS[module], [on_host(word, {path: directory}) for word in arguments])


def test_every_process_takes_its_command_line_and_its_configuration(
    documents: tuple[Document, ...], tmp_path: Path
) -> None:
    found = {type(_config(pod, documents, tmp_path)) for pod in pods(documents)}
    assert found == {RouterConfig, PrefillConfig, DecodeConfig}


def test_the_ports_of_a_process_are_those_that_its_pod_declares(
    documents: tuple[Document, ...], tmp_path: Path
) -> None:
    for pod in pods(documents):
        config = _config(pod, documents, tmp_path)
        declared = {port["name"]: port["containerPort"] for port in pod.main["ports"]}
        if isinstance(config, RouterConfig):
            ports = {"http": config.http_port, "grpc": config.grpc_port, "internal": config.internal_port}
        else:
            ports = {"grpc": config.port, "kv": config.data_port}
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                assert pod.main[probe].get("grpc", {"port": config.port})["port"] == config.port
        assert declared == ports, pod.owner


def test_workers_look_for_routers_where_a_service_without_an_address_of_its_own_names_them(
    documents: tuple[Document, ...], tmp_path: Path
) -> None:
    service = named(documents, "Service", "kvferry-routers")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    (port,) = service["spec"]["ports"]
    for pod in pods(documents):
        config = _config(pod, documents, tmp_path)
        if isinstance(config, RouterConfig):
            assert service["spec"]["selector"].items() <= pod.labels.items()
            assert config.internal_port == port["port"]
        else:
            assert config.routers == (f"dns+kvferry-routers:{port['port']}",)


def test_every_path_that_a_process_is_given_lies_in_a_volume(documents: tuple[Document, ...], tmp_path: Path) -> None:
    for pod in pods(documents):
        config = _config(pod, documents, tmp_path)
        mounted = mount_paths(pod, pod.main)
        for name, value in vars(config).items():
            if (name == "model" or name.endswith("_file")) and value:
                assert any(str(value).startswith(f"{path}/") for path in mounted), f"{pod.owner}: {name} {value}"


def test_a_model_is_prepared_where_the_process_looks_for_it(documents: tuple[Document, ...], tmp_path: Path) -> None:
    for pod in pods(documents):
        (prepare,) = pod.spec["initContainers"]
        words = command(prepare, variables(prepare, documents, FIELDS))
        assert words[:3] == ["python", "-m", "engine.prepare"]
        assert f"--link={_config(pod, documents, tmp_path).model}" in words
        assert not any("$(" in word for word in words), words
        (cache,) = [mount for mount in prepare["volumeMounts"] if mount["mountPath"] == "/cache"]
        assert "readOnly" not in cache


def test_what_is_drained_is_what_the_configuration_of_the_pod_says(tmp_path: Path) -> None:
    for name in OVERLAYS:
        for pod in pods(overlay(name)):
            directory = tmp_path / name
            directory.mkdir(exist_ok=True)
            config = _config(pod, overlay(name), directory)
            waits_s = 0.0
            if isinstance(config, RouterConfig):
                waits_s = float(pod.main["lifecycle"]["preStop"]["exec"]["command"][1])
                assert config.drain_timeout_s > config.request_timeout_s, "a request may outlast the draining"
            # Fifteen seconds to close, in the worst case.
            assert pod.spec["terminationGracePeriodSeconds"] >= waits_s + config.drain_timeout_s + 15, pod.owner


def test_configurations_hold_no_secret(documents: tuple[Document, ...]) -> None:
    for document in documents:
        if document["kind"] == "ConfigMap" and not document["metadata"]["name"].endswith("dashboard"):
            for text in document["data"].values():
                values = yaml.safe_load(text)
                names = values if isinstance(values, dict) else ()
                assert not any("secret" in name and not name.endswith("_file") for name in names)
