"""What each tenant had. The names are those of a file that may change, so there is a bound on how many get a label."""

from prometheus_client import CollectorRegistry, Counter

from router.observation.latency_metrics import RequestMeter

MAX_TENANTS = 256
"""Labels in the life of a router; whoever comes after that many is counted as `OTHERS`."""
OTHERS = "_others"
"""No tenant can have that name."""


class TenantMetrics:
    """Event-loop thread only. Without API keys there is nothing here: the totals say it all."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._known: set[str] = set()
        self._requests = Counter(
            "kvferry_tenant_requests", "Requests of a tenant that ended, by outcome.", ["tenant", "outcome"],
            registry=registry,
        )  # fmt: skip
        self._tokens = Counter(
            "kvferry_tenant_tokens", "Tokens of a tenant: prompts of finished requests, and generated ones.",
            ["tenant", "kind"], registry=registry,
        )  # fmt: skip

    def ended(self, tenant: str, outcome: str, meter: RequestMeter) -> None:
        """A request of that tenant has ended; empty: there are no keys."""
        if not tenant:
            return
        if tenant not in self._known:
            if len(self._known) >= MAX_TENANTS:
                tenant = OTHERS
            else:
                self._known.add(tenant)
        self._requests.labels(tenant, outcome).inc()
        self._tokens.labels(tenant, "prompt").inc(meter.prompt_tokens)
        self._tokens.labels(tenant, "generated").inc(meter.num_tokens)
