"""Who can connect to what, as the NetworkPolicies of an overlay have it."""

from collections.abc import Iterator

import pytest

from tests.support.manifests import OVERLAYS, Document, of_kind, overlay, pod

ROUTER_PUBLIC = (8000, 8001)
ROUTER_INTERNAL = 8002
WORKER_GRPC, WORKER_KV = 9000, 9001
STRANGER = {"app": "something-else"}
PEERS = ("router", "prefill", "decode")


@pytest.fixture(params=OVERLAYS)
def policies(request: pytest.FixtureRequest) -> list[Document]:
    return of_kind(overlay(request.param), "NetworkPolicy")


@pytest.fixture
def labels(policies: list[Document], request: pytest.FixtureRequest) -> dict[str, dict[str, str]]:
    name = request.node.callspec.params["policies"]
    return {role: pod(overlay(name), role).labels for role in PEERS}


def test_every_pod_is_closed_unless_a_rule_opens_it(
    policies: list[Document], labels: dict[str, dict[str, str]]
) -> None:
    for role in PEERS:
        kinds = {kind for policy in _of(policies, labels[role]) for kind in policy["spec"]["policyTypes"]}
        assert kinds == {"Ingress", "Egress"}, role


def test_strangers_reach_the_public_ports_of_a_router_and_nothing_else(
    policies: list[Document], labels: dict[str, dict[str, str]]
) -> None:
    for port in ROUTER_PUBLIC:
        assert _lets_in(policies, labels["router"], STRANGER, port)
    for role, port in (
        ("router", ROUTER_INTERNAL),
        *((role, port) for role in ("prefill", "decode") for port in (WORKER_GRPC, WORKER_KV, 12345)),
    ):
        assert not _lets_in(policies, labels[role], STRANGER, port), f"{role} {port}"


def test_everybody_reaches_whom_they_must(policies: list[Document], labels: dict[str, dict[str, str]]) -> None:
    for worker in ("prefill", "decode"):
        assert _connects(policies, labels[worker], labels["router"], ROUTER_INTERNAL)
        assert _connects(policies, labels["router"], labels[worker], WORKER_GRPC)
        for other in ("prefill", "decode"):
            assert _connects(policies, labels[worker], labels[other], WORKER_KV)
    for role in PEERS:
        assert any(_covers(rule, None, 53) for policy in _of(policies, labels[role]) for rule in _egress(policy))


def test_inside_the_cluster_too_only_what_is_needed_is_open(
    policies: list[Document], labels: dict[str, dict[str, str]]
) -> None:
    assert not _lets_in(policies, labels["router"], labels["router"], ROUTER_INTERNAL)
    for worker in ("prefill", "decode"):
        assert not _lets_in(policies, labels[worker], labels["router"], WORKER_KV)


def test_the_ports_of_the_policies_are_those_of_the_pods() -> None:
    documents = overlay("local-cpu")
    ports = {role: {port["containerPort"] for port in pod(documents, role).main["ports"]} for role in PEERS}
    assert ports == {
        "router": {*ROUTER_PUBLIC, ROUTER_INTERNAL},
        "prefill": {WORKER_GRPC, WORKER_KV},
        "decode": {WORKER_GRPC, WORKER_KV},
    }


def _connects(policies: list[Document], source: dict[str, str], target: dict[str, str], port: int) -> bool:
    sends = any(_covers(rule, target, port) for policy in _of(policies, source) for rule in _egress(policy))
    return sends and _lets_in(policies, target, source, port)


def _lets_in(policies: list[Document], target: dict[str, str], source: dict[str, str], port: int) -> bool:
    rules = [rule for policy in _of(policies, target) for rule in policy["spec"].get("ingress", ())]
    return any(_covers(rule, source, port) for rule in rules)


def _of(policies: list[Document], labels: dict[str, str]) -> list[Document]:
    return [policy for policy in policies if _selects(policy["spec"]["podSelector"], labels)]


def _egress(policy: Document) -> Iterator[Document]:
    yield from policy["spec"].get("egress", ())


def _covers(rule: Document, peer: dict[str, str] | None, port: int) -> bool:
    """Whether a rule opens a TCP port to a pod; None is an address outside of all pods."""
    peers = rule.get("from", rule.get("to"))
    if peers is not None and not any(peer is not None and _selects(each["podSelector"], peer) for each in peers):
        return False
    return "ports" not in rule or any(each["protocol"] == "TCP" and each["port"] == port for each in rule["ports"])


def _selects(selector: Document, labels: dict[str, str]) -> bool:
    assert selector.keys() <= {"matchLabels"}, "these tests know no other selectors"
    return bool(selector.get("matchLabels", {}).items() <= labels.items())
