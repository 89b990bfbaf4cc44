# SPDX-License-Identifier: Apache-2.0
"""The doctor says which interface the kernel's routes choose, and whether another would be better."""

import pytest

from dlcp.doctor import Status
from dlcp.doctor.examination import examine_own_address, examine_route
from dlcp.host import interfaces
from dlcp.host.interfaces import NetworkInterface, interface_of, with_route_to
from dlcp.session.options import Options


@pytest.fixture
def speeds(monkeypatch, tmp_path):
    """The kernel's data on interfaces; ``tell(name, speed, virtual)`` sets it."""
    monkeypatch.setattr(interfaces, "SYSFS", tmp_path / "net")
    (tmp_path / "net").mkdir()

    def tell(name, speed, virtual=False):
        device = tmp_path / ("virtual" if virtual else "pci") / name
        device.mkdir(parents=True)
        (device / "speed").write_text(f"{speed}\n")
        (tmp_path / "net" / name).symlink_to(device)

    return tell


@pytest.fixture
def host(namespaces):
    """A host with two interfaces, ``slow`` in 10.71.0.0/24 and ``fast`` in 10.72.0.0/24; both lead to 10.73.0.0/24."""
    made, far = namespaces.Namespace("host"), namespaces.Namespace("far")
    try:
        for number, name in enumerate(("slow", "fast"), 1):
            made.ip(
                f"link add {name} type veth peer name {name} netns {far.path}",
                f"addr add 10.7{number}.0.1/24 dev {name}",
                f"link set {name} up",
            )
            far.ip(f"link set {name} up")
            made.ip(f"route add 10.73.0.0/24 via 10.7{number}.0.9 metric {number}")
        yield made
    finally:
        made.close()
        far.close()


def test_the_kernel_is_asked_which_interfaces_lead_to_a_host(host):
    assert host.call(lambda: with_route_to("10.71.0.5")) == {"slow"}
    assert host.call(lambda: with_route_to("10.73.0.5")) == {"slow", "fast"}
    assert host.call(lambda: with_route_to("192.0.2.1")) == set()


def test_a_second_address_of_an_interface_is_its_own(host):
    host.ip("addr add 10.71.0.77/24 dev slow label slow:1")
    assert host.call(lambda: interface_of("10.71.0.77")).name == "slow"
    assert host.call(lambda: interface_of("10.71.0.78")) is None


def test_the_address_by_the_route_is_told_with_speed_and_mtu(host, speeds):
    speeds("slow", 1000)
    speeds("fast", 100_000)
    found = host.call(lambda: examine_own_address(Options(), {"MASTER_ADDR": "10.72.0.9"}))
    assert found.status is Status.OK
    assert found.text == "10.72.0.1, interface fast (100 Gbit/s, MTU 1500), by the route to MASTER_ADDR=10.72.0.9"
    assert (found.data["interface"], found.data["speed_mbps"]) == ("fast", 100_000)


def test_a_faster_interface_that_leads_there_too_is_a_note(host, speeds):
    speeds("slow", 1000)
    speeds("fast", 100_000)
    found = host.call(lambda: examine_route("10.73.0.5"))
    assert found.status is Status.NOTE
    assert found.text.startswith("10.71.0.1, interface slow (1 Gbit/s, MTU 1500), by the route to 10.73.0.5; fast")
    assert found.text.endswith("is faster and has a route there, too")
    assert "DLCP_BIND=10.72.0.1:0" in found.fix
    assert found.data["faster_interface"] == "fast"


def test_a_faster_interface_of_another_network_is_a_note_with_a_condition(host, speeds):
    speeds("slow", -1, virtual=True)
    speeds("fast", 25_000)
    found = host.call(lambda: examine_own_address(Options(), {"MASTER_ADDR": "10.71.0.9"}))
    assert found.status is Status.NOTE
    assert "interface slow (virtual, MTU 1500)" in found.text
    assert found.fix.startswith("if the other machines are on that network, meet at an address there")
    bound = host.call(lambda: examine_own_address(Options(bind="10.71.0.1:0"), {}))
    assert (bound.status, "as bind says" in bound.text) == (Status.NOTE, True)


def test_what_is_not_known_decides_nothing(host, speeds):
    for environment in ({"MASTER_ADDR": "10.71.0.9"}, {"MASTER_ADDR": "10.71.0.1"}, {}):
        assert host.call(lambda found=environment: examine_own_address(Options(), found)).status is Status.OK


def test_which_of_two_is_slower():
    def interface(speed_mbps, virtual=False):
        return NetworkInterface("x", "10.0.0.1", 1500, False, True, speed_mbps, virtual)

    assert interface(1000).slower_than(interface(10_000))
    assert not interface(10_000).slower_than(interface(1000))
    assert interface(0, True).slower_than(interface(1000))
    assert not interface(0).slower_than(interface(1000))
    assert not interface(0, True).slower_than(interface(1000, True))
    assert (interface(100).speed, interface(2500).speed, interface(0).speed) == ("100 Mbit/s", "2.5 Gbit/s", "")


def test_no_route_to_the_rendezvous_is_missing(host):
    found = host.call(lambda: examine_own_address(Options(), {"MASTER_ADDR": "192.0.2.1"}))
    assert found.status is Status.MISSING
    assert "there is no route to MASTER_ADDR=192.0.2.1: Network is unreachable" in found.text
