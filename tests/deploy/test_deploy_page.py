"""docs/deploy.md, section Kubernetes: its example works, and what its commands name is there."""

import itertools
import re
from pathlib import Path

import pytest
import yaml

from kvferry import __version__
from tests.support import deploy_page
from tests.support.deploy_page import page_commands
from tests.support.manifests import K8S, OVERLAYS, ROOT, Document, named, of_kind, overlay, pods, render

PAGE = deploy_page.PAGE.partition("## Kubernetes")[2]


def _commands(program: str) -> list[list[str]]:
    """The words of each command of that program."""
    found = [command for command in page_commands("Kubernetes") if command[0] == program]
    assert found
    return found


def _option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_the_example_of_a_kustomization_changes_what_it_says(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    # Where the example has the tree, the test has a link to it.
    (tmp_path / "kvferry").mkdir()
    (tmp_path / "kvferry" / "deploy").symlink_to(ROOT / "deploy")
    (tmp_path / "kustomization.yaml").write_text(example)
    documents = render(tmp_path)
    asked = yaml.safe_load(example)
    images = {each["newName"] for each in asked["images"]}
    for pod in pods(documents):
        for container in pod.all_containers:
            assert container["image"].rpartition(":")[0] in images
    (model,) = [
        each for each in of_kind(documents, "ConfigMap") if each["metadata"]["name"].startswith("kvferry-model")
    ]
    assert {"name=my-model", "source=/models/my-model"} == {f"{key}={model['data'][key]}" for key in ("name", "source")}
    (replicas,) = asked["replicas"]
    assert named(documents, "StatefulSet", replicas["name"])["spec"]["replicas"] == replicas["count"]
    assert "--api-keys-file" in " ".join(
        word for pod in pods(documents) for word in pod.main["args"] if pod.main["name"] == "router"
    )
    assert of_kind(documents, "ServiceMonitor")


def test_images_are_built_from_files_and_with_arguments_that_there_are() -> None:
    for command in _commands("docker"):
        text = (ROOT / _option(command, "--file")).read_text()
        for word, value in itertools.pairwise(command):
            if word == "--build-arg":
                assert f"ARG {value.partition('=')[0]}=" in text
        assert _option(command, "--tag").partition(":")[2] == __version__
        assert command[-1] == "."


def test_what_is_applied_and_looked_at_is_there() -> None:
    documents: list[Document] = []
    for command in _commands("kubectl"):
        if "--kustomize" in command:
            documents += render(ROOT / _option(command, "--kustomize"))
    named_things = {f"{document['kind'].lower()}/{document['metadata']['name']}" for document in documents}
    # The operator makes it for the cluster.
    named_things |= {f"service/{each['metadata']['name']}-head-svc" for each in of_kind(documents, "RayCluster")}
    for command in _commands("kubectl"):
        for word in command:
            if word.startswith(("deployment/", "service/")):
                assert word in named_things
        if "--namespace" in command:
            assert f"namespace/{_option(command, '--namespace')}" in named_things


def test_the_secret_that_is_made_is_the_one_that_pods_read() -> None:
    (command,) = [command for command in _commands("kubectl") if "secret" in command]
    name = command[command.index("generic") + 1]
    literal = next(word for word in command if word.startswith("--from-literal="))
    for overlay_name in OVERLAYS:
        for pod in pods(overlay(overlay_name)):
            (secret,) = [volume["secret"] for volume in pod.spec["volumes"] if "secret" in volume]
            assert secret["secretName"] == name
            assert [item["key"] for item in secret["items"]] == [literal.split("=")[1]]


@pytest.mark.parametrize("kind", ["overlays", "components"])
def test_the_tables_list_what_there_is(kind: str) -> None:
    listed = set(re.findall(r"^\| `([a-z-]+)` \|", PAGE, re.MULTILINE))
    assert {path.name for path in (K8S / kind).iterdir()} <= listed
