"""Both hand-off tables in every order of events: tiny configurations, explored to the last state."""

import sys
from collections.abc import Callable

import pytest

from tests.support.explore import explore
from tests.support.handoff_model import Model
from tests.support.sim_network import Way

CONFIGURATIONS = {
    "one hand-off of two pages, one misfortune": (1, 2, 1),
    "two hand-offs for the same block, one misfortune": (2, 1, 1),
    "one hand-off of one page, two misfortunes": (1, 1, 2),
}
STEPS = {
    "reserve", "push", "begin_work", "end_work", "sender", "receiver", "abort_receiver", "abort_sender", "lease",
    "open", "renew", "silence", "deadline", "break_sender", "break_receiver", "kill", "lose", "double", "swap",
}  # fmt: skip


@pytest.mark.parametrize("way", Way, ids=lambda way: way.value)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_no_order_of_events_breaks_a_promise(
    name: str, way: Way, record_property: Callable[[str, object], None]
) -> None:
    """Never a write after a fence, or to a block of another; one ending on each side; a commit means the content."""
    states, taken = explore(Model(way, *CONFIGURATIONS[name]))
    record_property("states", states)
    sys.stdout.write(f"{name}, {way.value}: {states} states, {sum(taken.values())} steps: {dict(taken)}\n")
    assert states > 1500
    assert set(taken) == STEPS, "not every kind of event happened"
