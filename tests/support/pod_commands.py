"""The command lines inside pods, as they would be executed: with their variables filled in, and, for tests outside
containers, with what only a cluster has put in the place of what a host has.

The mapping, which is all that differs from a pod:

| in the pod | on the host |
| --- | --- |
| `python` | this interpreter |
| a path below a volume's mount path | the same below a directory of the test; the volume `cache` is one for all pods |
| the pod's IP, 0.0.0.0, the DNS name of the routers | 127.0.0.1 |
| a port | a free one: the port of the routers where it means that, else one of the pod's own |
| the model's source | the model of the test |
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.support.manifests import Document, Pod, named

HOST = "127.0.0.1"
_VARIABLE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_]*)\)")
_FIELDS = {"metadata.name": "POD_NAME", "status.podIP": "POD_IP"}


def variables(container: Document, documents: Sequence[Document], fields: Mapping[str, str]) -> dict[str, str]:
    """The environment of a container. `fields` has the values of what is asked of the pod itself: POD_NAME, POD_IP."""
    values = {}
    for entry in container.get("env", ()):
        source = entry.get("valueFrom")
        if source is None:
            values[entry["name"]] = str(entry["value"])
        elif "fieldRef" in source:
            values[entry["name"]] = fields[_FIELDS[source["fieldRef"]["fieldPath"]]]
        else:
            reference = source["configMapKeyRef"]
            values[entry["name"]] = named(documents, "ConfigMap", reference["name"])["data"][reference["key"]]
    return values


def command(container: Document, values: Mapping[str, str]) -> list[str]:
    """`command` and `args` with $(VARIABLES) replaced as the kubelet does it."""
    words = [*container["command"], *container.get("args", ())]
    return [_VARIABLE.sub(lambda match: _value(match, values), word) for word in words]


def _value(match: "re.Match[str]", values: Mapping[str, str]) -> str:
    if match[0] == "$$":
        return "$"
    return values.get(match[1], match[0])


def mount_paths(pod: Pod, container: Document) -> dict[str, str]:
    """The volume at each mount path of a container. A volume that the pod does not have is a KeyError."""
    volumes = {volume["name"] for volume in pod.spec["volumes"]}
    paths = {mount["mountPath"]: mount["name"] for mount in container.get("volumeMounts", ())}
    for name in paths.values():
        if name not in volumes:
            raise KeyError(f"{pod.owner}: no volume {name}")
    return paths


def on_host(text: str, directories: Mapping[str, Path]) -> str:
    """A word of a command, or a value of a configuration, with a mount path at its start, or behind `=`, replaced by
    the directory that stands for the volume there."""
    longest_first = "|".join(re.escape(path) for path in sorted(directories, key=len, reverse=True))
    found = re.match(rf"(?P<flag>--[a-z-]+=)?(?P<path>{longest_first})(?=/|$)", text)
    if found is None:
        return text
    return f"{found['flag'] or ''}{directories[found['path']]}{text[found.end() :]}"


def configuration_on_host(text: str, directories: Mapping[str, Path], ports: Mapping[int, int]) -> str:
    """A configuration file of a ConfigMap with its paths, ports and addresses replaced."""
    values = yaml.safe_load(text)
    return yaml.safe_dump({key: _on_host(key, value, directories, ports) for key, value in values.items()})


def _on_host(key: str, value: Any, directories: Mapping[str, Path], ports: Mapping[int, int]) -> Any:
    if key == "routers":
        return [f"dns+{HOST}:{ports[int(address.rpartition(':')[2])]}" for address in value]
    if key == "host":
        return HOST
    if key == "port" or key.endswith("_port"):
        return ports[value]
    return on_host(value, directories) if isinstance(value, str) else value
