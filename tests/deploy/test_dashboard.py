"""What the dashboard and the alerts ask Prometheus for is there: names, labels, and the values of labels."""

import json
import re
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Metric

from kvferry_rpc.internal_pb2 import Role
from router.observation.metrics import RouterMetrics
from router.workers.worker_registry import WorkerRegistry
from runtime.clock import ManualClock
from tests.support.admission_desk import Desk
from tests.support.fake_workers import registration
from tests.support.manifests import Document, composed, named, of_kind, pods

OF_THE_TARGET = {"job", "instance", "namespace", "pod"}
_SERIES = re.compile(r"\bkvferry_[a-z0-9_]+")
_SELECTOR = re.compile(r"(kvferry_[a-z0-9_]+)\{([^}]*)\}")
_MATCHER = re.compile(r'([a-z_]+)\s*(=~|!=|!~|=)\s*"([^"]*)"')
_GROUPING = re.compile(r"\bby \(([^)]*)\)")


@pytest.fixture(scope="module")
def monitoring(tmp_path_factory: pytest.TempPathFactory) -> tuple[Document, ...]:
    return composed(tmp_path_factory.mktemp("monitoring"), "gpu", ["monitoring"])


@pytest.fixture(scope="module")
def dashboard(monitoring: tuple[Document, ...]) -> Any:
    return json.loads(named(monitoring, "ConfigMap", "kvferry-dashboard")["data"]["dashboard.json"])


@pytest.fixture(scope="module")
def expressions(monitoring: tuple[Document, ...], dashboard: Any) -> list[str]:
    """All PromQL there is."""
    (rules,) = of_kind(monitoring, "PrometheusRule")
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return asked + [rule["expr"] for group in rules["spec"]["groups"] for rule in group["rules"]]


@pytest.fixture(scope="module")
def exported() -> dict[str, dict[str, set[str]]]:
    """What a router with one worker exports: series, labels, and the values that those have."""
    registry, clock = CollectorRegistry(), ManualClock()
    metrics = RouterMetrics(registry, clock)
    workers = WorkerRegistry(clock)
    workers.attach(registration("decode-0", Role.DECODE), lambda: None)
    metrics.watch(workers, Desk().admission)
    for collector in list(registry._collector_to_names):
        # A metric with labels exports nothing before it has been used with some.
        names = getattr(collector, "_labelnames", ())
        if names:
            collector.labels(*("any" for _ in names))  # type: ignore[attr-defined]
    return _series(list(registry.collect()))


def _series(families: list[Metric]) -> dict[str, dict[str, set[str]]]:
    series: dict[str, dict[str, set[str]]] = {}
    for sample in (sample for family in families for sample in family.samples):
        labels = series.setdefault(sample.name, {})
        for name, value in sample.labels.items():
            labels.setdefault(name, set()).add(value)
    return series


def test_every_series_exists(expressions: list[str], exported: dict[str, dict[str, set[str]]]) -> None:
    asked = {name for expression in expressions for name in _SERIES.findall(expression)}
    assert len(asked) > 25
    assert asked - exported.keys() == set()


def test_every_label_that_is_asked_for_has_the_value(
    expressions: list[str], exported: dict[str, dict[str, set[str]]]
) -> None:
    for expression in expressions:
        for name, matchers in _SELECTOR.findall(expression):
            for label, operator, value in _MATCHER.findall(matchers):
                if label in OF_THE_TARGET:
                    continue
                values = exported[name][label]
                wanted = {value} if operator == "=" else set(value.split("|"))
                assert wanted <= values, f"{name}: {label} is one of {values}"


def test_what_is_grouped_by_is_a_label_of_every_series_in_the_expression(
    expressions: list[str], exported: dict[str, dict[str, set[str]]]
) -> None:
    for expression in expressions:
        labels = set.intersection(*({*exported[name]} for name in _SERIES.findall(expression))) | OF_THE_TARGET
        for grouping in _GROUPING.findall(expression):
            assert {label.strip() for label in grouping.split(",")} <= labels, expression


def test_the_dashboard_is_one_that_grafana_lays_out(dashboard: Any) -> None:
    panels = dashboard["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"]
            assert all(target["legendFormat"] for target in panel["targets"])


def test_grafana_and_prometheus_find_what_is_theirs(monitoring: tuple[Document, ...]) -> None:
    assert named(monitoring, "ConfigMap", "kvferry-dashboard")["metadata"]["labels"]["grafana_dashboard"] == "1"
    (monitor,) = of_kind(monitoring, "ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    selected = [
        service
        for service in of_kind(monitoring, "Service")
        if monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        and endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    ]
    assert [service["metadata"]["name"] for service in selected] == ["kvferry"]
    (router,) = [pod for pod in pods(monitoring) if selected[0]["spec"]["selector"].items() <= pod.labels.items()]
    assert router.main["name"] == "router"
