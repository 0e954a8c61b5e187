import gc
from collections.abc import Iterator

import pytest

from runtime.collector import loading, settle_for_serving


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()
    gc.enable()


def test_nothing_is_collected_while_a_process_loads_and_what_it_made_is_never_looked_at() -> None:
    with loading():
        assert not gc.isenabled()
        made = [{"a": []} for _ in range(1000)]

    assert gc.isenabled()
    looked_at = {id(one) for one in gc.get_objects()}
    assert not any(id(one) in looked_at for one in made)


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()

    with loading():
        pass

    assert not gc.isenabled()


def test_an_import_that_fails_leaves_the_collector_on() -> None:
    with pytest.raises(ImportError), loading():
        raise ImportError

    assert gc.isenabled()


def test_cycles_made_later_are_collected() -> None:
    with loading():
        pass
    cycle: list[object] = []
    cycle.append(cycle)
    del cycle

    assert gc.collect() > 0


def test_a_process_that_serves_is_looked_at_more_seldom_and_never_at_what_it_began_with() -> None:
    before, made = gc.get_threshold(), [{"a": []} for _ in range(1000)]
    settle_for_serving()

    looked_at = {id(one) for one in gc.get_objects()}
    assert not any(id(one) in looked_at for one in made)
    assert gc.isenabled()
    assert gc.get_threshold()[0] > before[0]
