# SPDX-License-Identifier: Apache-2.0
"""Links that lose packets are found by counters that are read at different times, and good ones are left alone."""

from itertools import pairwise

import numpy as np
import pytest

from dlcp.controller.entries import entries, next_hops
from dlcp.controller.fabric import Port, dispensable, leaf_spine
from dlcp.controller.links import LinkLosses

FABRIC = leaf_spine(2, 2, 1)
BAD = Port("leaf1", 2)
"""The port of departure of a direction that loses packets, and the other end of its link."""
FAR = FABRIC.neighbours["leaf1"][2].port
UNDER_WAY = 20
"""Packets between both ends of a link."""


class Counters:
    """Packets at all ports of a fabric whose links carry as many packets in both directions."""

    def __init__(self, seed, reading_s=0.01, rate_pps=5000):
        self.losses, self._reading_s, self._rate_pps = {}, reading_s, rate_pps
        self._random = np.random.default_rng(seed)
        self._ends = {
            Port(name, number): neighbour.port
            for name, ports in FABRIC.neighbours.items()
            for number, neighbour in ports.items()
            if neighbour.port is not None
        }
        self._sent = dict.fromkeys(self._ends, 0)
        self._arrived = dict.fromkeys(self._ends, -UNDER_WAY)

    def restart(self, switch):
        for counts in (self._sent, self._arrived):
            counts.update({port: 0 for port in counts if port.switch == switch})

    def _go_on(self, seconds):
        for start, end in self._ends.items():
            sent = self._random.poisson(self._rate_pps * seconds)
            self._sent[start] += sent
            self._arrived[end] += sent - self._random.binomial(sent, self.losses.get(start, 0))

    def _read(self, counts):
        self._go_on(self._reading_s * self._random.random())
        found = {port: max(0, count) for port, count in counts.items()}
        self._go_on(self._reading_s * self._random.random())
        return found

    def note(self, links):
        self._go_on(1)
        return links.note(self._read(self._arrived), self._read(self._sent), self._read(self._arrived))


@pytest.fixture
def clock(monkeypatch):
    """Return a list with the time of the code under test, in seconds."""
    now_s = [1000.0]
    monkeypatch.setattr("dlcp.controller.links.time.monotonic", lambda: now_s[0])
    return now_s


def rounds(counters, links, clock, count):
    """Compare the links once a second for ``count`` seconds; return the messages of each second that has any."""
    said = {}
    for number in range(1, count + 1):
        clock[0] += 1
        if lines := counters.note(links):
            said[number] = lines
    return said


@pytest.mark.parametrize("reading_s", [0.0, 0.01, 0.1, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_good_links_are_left_alone_however_late_the_counters_are_read(clock, seed, reading_s):
    counters, links = Counters(seed, reading_s), LinkLosses(FABRIC)
    assert rounds(counters, links, clock, 300) == {}
    assert max(links.shares.values(), default=0) == 0


@pytest.mark.parametrize("loss", [0.03, 0.05, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_a_link_that_begins_to_lose_is_avoided_within_ten_seconds(clock, seed, loss):
    counters, links = Counters(seed, reading_s=0.03), LinkLosses(FABRIC)
    assert rounds(counters, links, clock, 30 + seed) == {}
    counters.losses[BAD] = loss
    said = rounds(counters, links, clock, 9)
    assert len(said) == 1
    assert said.popitem()[1][0].startswith(f"link {BAD} - {FAR} loses ")
    assert links.suspects == [(BAD, FAR)]


def test_an_avoided_link_is_tried_again_less_and_less_often_until_it_is_good(clock):
    counters, links = Counters(7), LinkLosses(FABRIC)
    counters.losses[BAD] = 0.05
    said = rounds(counters, links, clock, 100)
    tried = [number for number, lines in said.items() if "is tried again with few packets" in lines[0]]
    pauses = np.diff(tried)
    assert 3 <= len(tried) <= 4
    assert all(later > 1.5 * sooner for sooner, later in pairwise(pauses))
    counters.losses.clear()
    assert rounds(counters, links, clock, 100).popitem()[1] == [f"link {BAD} - {FAR} is good again"]
    assert (links.suspects, links.on_trial) == ([], frozenset())


def test_few_packets_are_enough_in_the_end(clock):
    counters, links = Counters(3, reading_s=0.0, rate_pps=250), LinkLosses(FABRIC)
    assert rounds(counters, links, clock, 60) == {}
    counters.losses[BAD] = 0.03
    assert any("loses" in line for lines in rounds(counters, links, clock, 20).values() for line in lines)


def test_a_switch_that_restarts_between_two_readings_is_no_loss(clock):
    counters, links = Counters(4), LinkLosses(FABRIC)
    rounds(counters, links, clock, 20)
    before, sent = counters._read(counters._arrived), counters._read(counters._sent)
    counters.restart("spine1")
    assert links.note(before, sent, counters._read(counters._arrived)) == []


def test_three_dead_switches_of_four_are_found():
    fabric = leaf_spine(3, 4, 1)
    links = LinkLosses(fabric)
    zeros = dict.fromkeys(links._directions, 0)
    links.note(zeros, zeros, zeros)
    sent = dict.fromkeys(links._directions, 1000)
    ends = links._directions.items()
    arrived = {end: 1000 if "spine4" in (start.switch, end.switch) else 0 for start, end in ends}
    assert len(links.note(arrived, sent, arrived)) == 9
    avoided = dispensable(fabric, (), links.suspects)
    assert {port.switch for port in avoided} - {"leaf1", "leaf2", "leaf3"} == {"spine1", "spine2", "spine3"}


def test_losses_at_all_ports_are_no_links_fault(clock):
    counters, links = Counters(8), LinkLosses(FABRIC)
    counters.losses = dict.fromkeys(links._directions, 0.05)
    assert rounds(counters, links, clock, 100) == {}


def test_a_switch_that_forwards_nothing_is_avoided(clock):
    counters, links = Counters(9), LinkLosses(FABRIC)
    counters.losses = {port: 1 for port, end in links._directions.items() if "spine1" in (port.switch, end.switch)}
    rounds(counters, links, clock, 5)
    spines = {end.switch for ends in links.suspects for end in ends} - {"leaf1", "leaf2"}
    assert (len(links.suspects), spines) == (2, {"spine1"})


def test_a_restart_sets_counters_back_and_is_no_loss(clock):
    counters, links = Counters(9), LinkLosses(FABRIC)
    rounds(counters, links, clock, 20)
    for name in ("spine1", "leaf2"):
        counters.restart(name)
        assert rounds(counters, links, clock, 30) == {}


def test_routes_avoid_a_link_as_long_as_all_hosts_reach_each_other():
    other = (Port("leaf1", 3), FABRIC.neighbours["leaf1"][3].port)
    avoided = dispensable(FABRIC, (), [(BAD, FAR), other])
    assert avoided == {BAD, FAR}
    assert dispensable(FABRIC, ["spine2"], [(BAD, FAR)]) == {"spine2"}
    for leaf, host in (("leaf1", "host1"), ("leaf2", "host0")):
        (port,) = next_hops(FABRIC, leaf, avoided)[host]
        assert FABRIC.neighbours[leaf][port].port.switch == "spine2"
    for name in FABRIC.neighbours:
        entries(FABRIC, name, avoided)


def test_a_link_on_trial_gets_one_packet_in_32_from_both_sides():
    for leaf, host in (("leaf1", "host1"), ("leaf2", "host0")):
        ports = next_hops(FABRIC, leaf, (), {BAD, FAR})[host]
        spines = [FABRIC.neighbours[leaf][port].port.switch for port in ports]
        assert (spines.count("spine1"), spines.count("spine2")) == (1, 31)
    assert next_hops(FABRIC, "spine1", (), {BAD, FAR}) == next_hops(FABRIC, "spine1")
