# SPDX-License-Identifier: Apache-2.0
"""Which member of a weighted group a packet chooses: as on BMv2, whatever has come and gone before."""

import random
from collections import Counter

import pytest
from finsy.proto import p4r

from dlcp.switch import BACKENDS, DROP_PORT
from dlcp.switch.p4runtime.device import P4RuntimeDevice, SetAction
from tests.conformance.frames import ethernet, ipv4, udp
from tests.conformance.simple_switch import available
from tests.p4runtime.control import DELETE, INSERT, MODIFY, Code, Control, Words, config
from tests.p4runtime.loops import Loop
from tests.p4runtime.targets import Bmv2, PacketBmv2

SOURCE, DESTINATION = 0x0A000101, 0x0A000005


def packet(chance):
    datagram = udp(bytes(20), src=SOURCE, dst=DESTINATION, src_port=chance.randint(1, 65_535), dst_port=7)
    return ethernet(ipv4(datagram, src=SOURCE, dst=DESTINATION, protocol=17))


class Ours:
    """The built-in switch without a server."""

    def __init__(self, backend):
        self._device = P4RuntimeDevice(Loop(), backend)
        self._device.set_pipeline(SetAction.VERIFY_AND_COMMIT, config())

    def write(self, kind, entity):
        return self._device.write([p4r.Update(type=kind, entity=entity)])[0].canonical_code == 0

    def port(self, data):
        port, _, _ = self._device.program.ingress(bytearray(data), 1, 0)
        return None if port == DROP_PORT else port


@pytest.fixture(params=BACKENDS)
def ours(request):
    if request.param == "numba":
        pytest.importorskip("numba")
    return Ours(request.param)


@pytest.fixture
def theirs():
    """simple_switch_grpc that takes packets from this process."""
    missing = Bmv2.missing() or ("" if available()[0] else available()[1])
    if missing:
        pytest.skip(missing)
    switch = PacketBmv2()
    try:
        switch.start()
        with Control(switch.address) as control:
            control.arbitrate(1)
            control.set_pipeline(config())
            switch.write = lambda kind, entity: control.result(kind, entity) is Code.OK
            yield switch
    finally:
        switch.close()


def test_a_member_is_chosen_as_often_as_it_weighs(ours):
    words = Words(config().p4info)
    for number in (1, 2, 3):
        assert ours.write(
            INSERT, words.member("route_selector", number, words.action("to_next_hop", port=number, mac=1))
        )
    assert ours.write(INSERT, words.group("route_selector", 1, {1: 1, 2: 3, 3: 6}))
    assert ours.write(INSERT, words.entry("ipv4_route", {"ipv4_dst": (0x0A000000, 8)}, ("group", 1)))
    chance = random.Random(1)
    chosen = Counter(ours.port(packet(chance)) for _ in range(2_000))
    assert sorted(chosen) == [1, 2, 3]
    assert all(abs(chosen[port] / 2_000 - share) < 0.05 for port, share in ((1, 0.1), (2, 0.3), (3, 0.6)))


def test_members_come_and_go_as_on_bmv2(ours, theirs):
    words = Words(config().p4info)
    chance = random.Random(7)
    members, groups = set(), {}

    def write(kind, entity):
        done = ours.write(kind, entity)
        assert theirs.write(kind, entity) == done
        return done

    def change():
        choice = chance.random()
        if choice < 0.35 or not members:
            number = chance.randint(1, 9)
            member = words.member("route_selector", number, words.action("to_next_hop", port=number, mac=number))
            assert write(MODIFY if number in members else INSERT, member)
            members.add(number)
        elif choice < 0.5:
            number = chance.choice(sorted(members))
            if write(DELETE, words.member("route_selector", number)):
                members.remove(number)
        elif choice < 0.9 or not groups:
            number = chance.randint(1, 3)
            weights = {
                item: chance.randint(1, 4) for item in chance.sample(sorted(members), chance.randint(1, len(members)))
            }
            assert write(MODIFY if number in groups else INSERT, words.group("route_selector", number, weights))
            groups[number] = weights
        else:
            number = chance.choice(sorted(groups))
            assert write(DELETE, words.group("route_selector", number, {}))
            del groups[number]

    for _ in range(20):
        for _ in range(chance.randint(1, 8)):
            change()
        for group in sorted(groups)[:1]:
            entry = words.entry("ipv4_route", {"ipv4_dst": (0x0A000000, 8)}, ("group", group))
            assert write(INSERT, entry)
            for _ in range(20):
                data = packet(chance)
                assert ours.port(data) == theirs.port(data) in groups[group]
            assert write(DELETE, entry)
