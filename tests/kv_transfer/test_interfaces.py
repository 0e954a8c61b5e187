"""Which network interface an address belongs to."""

import pytest

from kv_transfer.interfaces import interface_of, ucx_devices


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_loopback_is_the_interface_lo(host: str) -> None:
    assert interface_of(host) == "lo"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.255", "no such host."])
def test_all_addresses_and_addresses_of_others_are_no_interface(host: str) -> None:
    assert interface_of(host) is None
    assert ucx_devices(host) is None
