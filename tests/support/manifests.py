"""The Kubernetes manifests of `deploy/k8s`, rendered by the real `kubectl kustomize`, for tests that judge them."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
K8S = ROOT / "deploy" / "k8s"
OVERLAYS = ("local-cpu", "gpu", "rdma-gpu", "tensor-parallel")
COMPONENTS = ("api-keys", "gateway", "monitoring", "tls")
KUBECTL = Path(sys.executable).with_name("kubectl")

Document = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    """A pod that some object makes."""

    owner: str
    labels: dict[str, str]
    spec: Document

    @property
    def containers(self) -> list[Document]:
        """Those that run on."""
        return list(self.spec["containers"])

    @property
    def all_containers(self) -> list[Document]:
        """Those that only prepare too."""
        return [*self.spec.get("initContainers", ()), *self.containers]

    @property
    def main(self) -> Document:
        """The one that the pod is there for."""
        return self.containers[0]


@functools.cache
def render(directory: Path) -> tuple[Document, ...]:
    """The objects that the kustomization in `directory` makes."""
    done = subprocess.run([KUBECTL, "kustomize", directory], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.load_all(done.stdout, yaml.CSafeLoader))


def overlay(name: str) -> tuple[Document, ...]:
    """The objects of one overlay."""
    return render(K8S / "overlays" / name)


def composed(directory: Path, name: str, components: Sequence[str]) -> tuple[Document, ...]:
    """An overlay with components, as a user's own kustomization in `directory`, which is empty, puts them together."""
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "kvferry",
        "resources": [os.path.relpath(K8S / "overlays" / name, directory.resolve())],
        "components": [os.path.relpath(K8S / "components" / each, directory.resolve()) for each in components],
    }
    (directory / "kustomization.yaml").write_text(json.dumps(kustomization))
    return render(directory)


def of_kind(documents: Sequence[Document], kind: str) -> list[Document]:
    """Those of one kind."""
    return [document for document in documents if document["kind"] == kind]


def named(documents: Sequence[Document], kind: str, name: str) -> Document:
    """The one object of that kind and name."""
    (found,) = [document for document in of_kind(documents, kind) if document["metadata"]["name"] == name]
    return found


def pods(documents: Sequence[Document]) -> list[Pod]:
    """Every pod template, also inside the kinds of operators."""
    return [
        Pod(
            f"{document['kind']} {document['metadata']['name']}{part}", template["metadata"]["labels"], template["spec"]
        )
        for document in documents
        for part, template in _templates(document)
    ]


def pod(documents: Sequence[Document], role: str) -> Pod:
    """The pod of a role: router, prefill or decode."""
    (found,) = [each for each in pods(documents) if each.labels["app.kubernetes.io/name"] == f"kvferry-{role}"]
    return found


def _templates(document: Document) -> Iterator[tuple[str, Document]]:
    spec = document.get("spec", {})
    if document["kind"] in ("Deployment", "StatefulSet", "Job", "DaemonSet"):
        yield "", spec["template"]
    elif document["kind"] == "LeaderWorkerSet":
        yield " leader", spec["leaderWorkerTemplate"]["leaderTemplate"]
        yield " worker", spec["leaderWorkerTemplate"]["workerTemplate"]
    elif document["kind"] == "RayCluster":
        yield " head", spec["headGroupSpec"]["template"]
        for group in spec["workerGroupSpecs"]:
            yield f" {group['groupName']}", group["template"]
