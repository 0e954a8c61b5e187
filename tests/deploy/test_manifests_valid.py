"""Every manifest renders, and is valid by the schemas of Kubernetes and of the operators whose kinds it uses."""

import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate.utils
import pytest
import yaml

from tests.support.manifests import COMPONENTS, K8S, OVERLAYS, ROOT, Document, composed, overlay, pods, render

KUBERNETES_VERSIONS = ("1.32", "1.37")
SCHEMAS = Path(__file__).parent / "schemas"
# The operators' own definitions, where somebody has put them beside the project.
DEFINITIONS = ROOT.parent / "shared" / "schemas"
# What operators add; each file says what of it we use. The whole definitions are larger than all our manifests.
CUSTOM_KINDS = {
    "ServiceMonitor": "service-monitor",
    "PrometheusRule": "prometheus-rule",
    "HTTPRoute": "http-route",
    "LeaderWorkerSet": "leader-worker-set",
    "RayCluster": "ray-cluster",
}


@pytest.fixture(scope="module")
def everything(
    tmp_path_factory: pytest.TempPathFactory, with_everything: tuple[Document, ...]
) -> Iterator[list[Document]]:
    """All objects of all kustomizations, and of all components upon two of them; each different one once."""
    directories = [K8S / "base", K8S / "kuberay", *(K8S / "overlays" / name for name in OVERLAYS)]
    documents = [document for directory in directories for document in render(directory)]
    documents += [*with_everything, *composed(tmp_path_factory.mktemp("rdma"), "rdma-gpu", COMPONENTS)]
    with pytest.MonkeyPatch.context() as patch:
        # It reads megabytes of schemas for each object anew.
        patch.setattr(
            kubernetes_validate.utils, "schema_contents", functools.cache(kubernetes_validate.utils.schema_contents)
        )
        yield list({json.dumps(document, sort_keys=True): document for document in documents}.values())


def test_every_kustomization_of_the_tree_is_rendered_by_these_tests() -> None:
    found = {path.parent.relative_to(K8S).as_posix() for path in K8S.rglob("kustomization.yaml")}
    assert found == {
        "base",
        "kuberay",
        "namespace",
        *(f"overlays/{name}" for name in OVERLAYS),
        *(f"components/{name}" for name in COMPONENTS),
    }


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_kubernetes_knows_every_field(everything: list[Document], version: str) -> None:
    built_in = [document for document in everything if document["kind"] not in CUSTOM_KINDS]
    assert len(built_in) > 40
    for document in built_in:
        kubernetes_validate.validate(document, version, strict=True)


def test_pods_inside_the_kinds_of_operators_are_pods(everything: list[Document]) -> None:
    owned = [pod for pod in pods(everything) if pod.owner.split()[0] in CUSTOM_KINDS]
    assert {pod.owner.split()[0] for pod in owned} == {"LeaderWorkerSet", "RayCluster"}
    for pod in owned:
        manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"labels": pod.labels}, "spec": pod.spec}
        kubernetes_validate.validate(manifest, KUBERNETES_VERSIONS[-1], strict=True)


def test_the_kinds_of_operators_have_the_form_that_we_know_of_them(everything: list[Document]) -> None:
    custom = [document for document in everything if document["kind"] in CUSTOM_KINDS]
    assert {document["kind"] for document in custom} == set(CUSTOM_KINDS)
    for document in custom:
        jsonschema.validate(document, json.loads((SCHEMAS / f"{CUSTOM_KINDS[document['kind']]}.json").read_text()))


def test_the_kinds_of_operators_are_valid_by_their_whole_definitions(
    everything: list[Document], pytestconfig: pytest.Config
) -> None:
    directory = Path(pytestconfig.getoption("--crd-schemas") or DEFINITIONS)
    if not directory.is_dir():
        pytest.skip(f"no definitions of custom resources in {directory}: name their directory by --crd-schemas")
    definitions = dict(_definitions(sorted(directory.glob("*.yaml"))))
    custom = [document for document in everything if document["kind"] in CUSTOM_KINDS]
    for document in custom:
        schema = definitions[document["apiVersion"], document["kind"]]
        # Not `jsonschema.validate`, which judges the schema first: its patterns are Go's.
        jsonschema.Draft202012Validator(schema).validate(document)
        assert list(_unknown(document, schema, document["kind"])) == []


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("Deployment", ("spec", "replicsa"), 2),
        ("StatefulSet", ("spec", "template", "spec", "containers", 0, "livenessProbe", "grpc", "port"), "grpc"),
        ("NetworkPolicy", ("spec", "podSelector", "matchLabel"), {}),
    ],
)
def test_a_wrong_field_is_found(kind: str, path: tuple[str | int, ...], value: object) -> None:
    document = json.loads(json.dumps(next(each for each in overlay("local-cpu") if each["kind"] == kind)))
    place = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(Exception, match=str(path[-1]) if value != "grpc" else "grpc"):
        kubernetes_validate.validate(document, KUBERNETES_VERSIONS[-1], strict=True)


def _definitions(paths: Sequence[Path]) -> Iterator[tuple[tuple[str, str], Document]]:
    for path in paths:
        for definition in yaml.load_all(path.read_text(), yaml.CSafeLoader):
            spec = definition["spec"]
            for version in spec["versions"]:
                key = f"{spec['group']}/{version['name']}", spec["names"]["kind"]
                yield key, version["schema"]["openAPIV3Schema"]


def _unknown(value: Any, schema: Document, where: str) -> Iterator[str]:
    """Fields that the schema does not name: the API server drops them without a word."""
    if isinstance(value, dict) and "properties" in schema:
        for name, inner in value.items():
            if name in schema["properties"]:
                yield from _unknown(inner, schema["properties"][name], f"{where}.{name}")
            elif not schema.get("x-kubernetes-preserve-unknown-fields") and where.count("."):
                yield f"{where}.{name}"
    elif isinstance(value, list) and "items" in schema:
        for number, inner in enumerate(value):
            yield from _unknown(inner, schema["items"], f"{where}[{number}]")
