# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace
from pathlib import Path

import pytest

from dlcp.controller.entries import entries
from dlcp.controller.fabric import Job, Policy, PolicyError, Remap, Thresholds, leaf_spine, load, star
from dlcp.switch import Action, GroupRef, PortQueueing, Program, apply_entries, parse_number
from dlcp.wire import PacketType, Queue

REPOSITORY = Path(__file__).parents[2]


def rows(fabric, table, switch="switch"):
    return [entry for entry in entries(fabric, switch).entries if entry.table == table]


def thresholds(fabric):
    return {
        (entry.match["queue"], entry.match["drop_class"]): entry.target.params["depth"]
        for entry in rows(fabric, "drop_threshold")
    }


def test_every_host_is_reached_through_a_group_at_its_port():
    fabric = star(3)
    [profile] = entries(fabric, "switch").profiles
    members, groups = dict(profile.members), dict(profile.groups)
    for port, host in enumerate(fabric.hosts, 1):
        address, mac = parse_number(host.address), parse_number(host.mac)
        [route] = [row for row in rows(fabric, "ipv4_route") if row.match == {"ipv4_dst": (address, 32)}]
        [member] = groups[route.target.id]
        assert members[member] == Action("to_next_hop", {"port": port, "mac": mac})
        assert [row.target for row in rows(fabric, "ethernet_route") if row.match["ethernet_dst"] == mac] == [
            Action("to_port", {"port": port})
        ]


def test_leaf_sprays_over_its_spines_and_spreads_what_cannot_be_sprayed():
    fabric = leaf_spine(2, 2, 2)
    [profile] = entries(fabric, "leaf1").profiles
    groups = dict(profile.groups)
    assert all(isinstance(row.target, GroupRef) for row in rows(fabric, "ipv4_route", "leaf1"))
    routes = {row.match["ipv4_dst"]: groups[row.target.id] for row in rows(fabric, "ipv4_route", "leaf1")}
    assert routes == {(0x0A000000 + host, 32): ports for host, ports in enumerate([(1,), (2,), (3, 4), (3, 4)], 1)}
    assert [row.target.params["port"] for row in rows(fabric, "ethernet_route", "leaf1")] == [1, 2, 3, 4]


def test_tags_are_believed_between_switches_and_from_hosts_where_the_operator_says_so():
    fabric = leaf_spine(2, 2, 2)
    fabric = replace(fabric, hosts=(fabric.hosts[0], replace(fabric.hosts[1], trusted=False), *fabric.hosts[2:]))
    assert [row.match["ig_port"] for row in rows(fabric, "port_trust", "leaf1")] == [1, 3, 4]
    assert [row.match["ig_port"] for row in rows(fabric, "port_trust", "leaf2")] == [1, 2, 3, 4]
    assert [row.match["ig_port"] for row in rows(fabric, "port_trust", "spine1")] == [1, 2]


def test_less_valuable_classes_are_dropped_from_shallower_depths():
    limits = thresholds(star(2, queueing=PortQueueing(rate_bps=10**9, depth_packets=100)))
    assert set(limits) == {(queue, drop_class) for queue in range(8) for drop_class in range(1, 8)}
    for queue in range(8):
        depths = [limits[queue, drop_class] for drop_class in range(1, 8)]
        assert depths == sorted(depths, reverse=True)
        assert len(set(depths)) == 7
        assert depths[-1] < depths[0] < 100


def test_thresholds_follow_the_shallowest_queue_of_the_switch():
    fabric = star(2, queueing=PortQueueing(10**9, 200))
    shallow = replace(fabric.links[1], depth_packets=tuple(range(10, 90, 10)))
    found = thresholds(replace(fabric, links=(fabric.links[0], shallow)))
    assert found[7, 1] == int(0.7 * 80)
    assert found[1, 1] == int(0.7 * 20)
    shared = replace(fabric.links[1], limit_packets=20)
    assert thresholds(replace(fabric, links=(fabric.links[0], shared)))[7, 1] == int(0.7 * 20)


def test_what_exceeds_a_share_is_dropped_by_value_shortly_before_its_queue_is_full():
    fabric = star(1, queueing=PortQueueing(10**9, 100))
    assert [thresholds(fabric)[0, drop_class] for drop_class in range(1, 8)] == [85, 80, 75, 70, 65, 60, 55]
    own = Policy(by_queue={0: Thresholds(drop_at=(0.5,) * 7)})
    assert thresholds(star(1, queueing=PortQueueing(10**9, 100), policy=own))[0, 1] == 50


def test_queues_have_thresholds_of_their_own_where_the_policy_says_so():
    own = Thresholds(drop_at=(0.5,) * 7, ecn_at=0.1)
    fabric = star(1, queueing=PortQueueing(10**9, 100), policy=Policy(ecn_at=0.2, by_queue={3: own}))
    assert {thresholds(fabric)[3, drop_class] for drop_class in range(1, 8)} == {50}
    assert thresholds(fabric)[4, 1] == 70
    marks = {row.match["queue"]: row.target.params["depth"] for row in rows(fabric, "ecn_threshold")}
    assert marks == {0: 20, 1: 20, 2: 20, 3: 10, 4: 20, 5: 20, 6: 20}


def test_shares_become_a_data_and_a_control_meter_at_every_port():
    job = Job(7, share=0.8, control_share=0.1, shares={"host1": 0.5}, burst_s=0.02)
    fabric = star(2, queueing=PortQueueing(rate_bps=80_000_000), jobs=[job])
    meters = {(row.match["eg_port"], row.match["control"]): row.meter for row in rows(fabric, "job_share")}
    assert {key: meter.cir for key, meter in meters.items()} == {
        (1, 0): 8_000_000,
        (2, 0): 5_000_000,
        (1, 1): 1_000_000,
        (2, 1): 1_000_000,
    }
    assert all(meter.pir == meter.cir and meter.cburst == meter.pburst == 200_000 for meter in meters.values())
    assert all(row.match["job"] == 7 for row in rows(fabric, "job_share"))


def test_burst_lets_a_job_send_back_to_back_even_on_a_slow_port():
    fabric = star(1, queueing=PortQueueing(rate_bps=1_000_000), jobs=[Job(1)])
    assert all(row.meter.cburst == 8 * fabric.mtu_bytes for row in rows(fabric, "job_share"))


def test_packets_of_the_jobs_named_are_trimmed():
    assert not rows(star(1), "trimming")
    trimmed = rows(star(1, policy=Policy(trim=(3, 0xFFFF))), "trimming")
    assert [(row.match, row.target.name) for row in trimmed] == [({"job": 3}, "trim"), ({"job": 0xFFFF}, "trim")]


def test_ports_are_set_up_with_their_queueing():
    fabric = star(2)
    fabric = replace(fabric, links=(replace(fabric.links[0], rate_bps=5, loss=0.01), fabric.links[1]))
    assert entries(fabric, "switch").ports == {1: PortQueueing(rate_bps=5, loss=0.01), 2: fabric.queueing}


@pytest.mark.parametrize(
    ("remap", "job", "tag", "becomes"),
    [
        (Remap(job=2, to_queue=3), 2, (6, 5), (3, 5)),
        (Remap(job=2, to_queue=3), 1, (6, 5), (6, 5)),
        (Remap(queue=6, to_drop_class=0), 9, (6, 5), (6, 0)),
        (Remap(queue=6, to_drop_class=0), 9, (5, 5), (5, 5)),
        (Remap(drop_class=5, to_queue=1, to_drop_class=7), 9, (4, 5), (1, 7)),
        (Remap(to_queue=2), 9, (4, 0), (2, 0)),
    ],
)
def test_remap_changes_what_it_says_and_keeps_the_rest(remap, job, tag, becomes):
    fabric = star(1, policy=Policy(remap=(remap, Remap(job=77, to_queue=0))))
    assert classified(fabric, job, 1, *tag) == becomes
    assert classified(fabric, job, 2, *tag) == tag


def test_the_first_remap_that_fits_counts():
    fabric = star(1, policy=Policy(remap=(Remap(job=2, to_queue=3), Remap(to_queue=5, to_drop_class=1))))
    assert classified(fabric, 2, 1, 6, 6) == (3, 6)
    assert classified(fabric, 3, 1, 6, 6) == (5, 1)


def test_a_fabric_without_jobs_believes_the_tags_of_all():
    assert rows(star(2), "classify") == []


@pytest.mark.parametrize("kind", [PacketType.DATA, PacketType.STOP])
def test_where_jobs_are_named_the_packets_of_others_wait_below_all_traffic(kind):
    fabric = star(2, jobs=[Job(1, 0.4), Job(7, 0.4)])
    assert classified(fabric, 1, kind, 6, 5) == classified(fabric, 7, kind, 6, 5) == (6, 5)
    for job in (0, 2, 3, 65_535):
        assert classified(fabric, job, kind, 7, 0) == classified(fabric, job, kind, 6, 5) == (Queue.EXCESS, 0)


@pytest.mark.parametrize("remap", [Remap(to_queue=5), Remap(queue=6, to_drop_class=3), Remap(6, to_queue=2)])
def test_a_remap_of_all_jobs_lifts_none_that_is_not_named(remap):
    fabric = star(2, jobs=[Job(1, 0.4), Job(6, 0.4)], policy=Policy(remap=(remap,)))
    assert classified(fabric, 6, PacketType.DATA, 6, 5) != (6, 5)
    assert classified(fabric, 1, PacketType.DATA, 5, 5) == (5, 5)
    assert classified(fabric, 3, PacketType.DATA, 6, 5) == (Queue.EXCESS, 0)


def test_a_job_may_be_remapped_without_a_share():
    fabric = star(2, jobs=[Job(1)], policy=Policy(remap=(Remap(job=9, to_queue=2),)))
    assert classified(fabric, 9, PacketType.DATA, 6, 5) == (2, 5)
    assert classified(fabric, 9, PacketType.STOP, 7, 0) == (Queue.EXCESS, 0)


def classified(fabric, job, kind, queue, drop_class):
    """What the table `classify` says of a packet, by the rules of P4Runtime: the highest priority that fits."""
    packet = {"job": job, "type": kind, "queue": queue, "drop_class": drop_class}
    fits = [
        row
        for row in rows(fabric, "classify")
        if all(packet[name] & mask == value for name, (value, mask) in row.match.items())
    ]
    if not fits:
        return queue, drop_class
    best = max(fits, key=lambda row: row.priority)
    assert [row.priority for row in fits].count(best.priority) == 1
    if best.target == Action("as_tagged"):
        return queue, drop_class
    return best.target.params["queue"], best.target.params["drop_class"]


def test_entries_of_every_switch_of_the_examples_fit_the_program():
    program = Program.load(REPOSITORY / "p4/build/dlcp.json")
    for path in sorted((REPOSITORY / "controller/examples").glob("*.yaml")):
        fabric = load(path)
        for switch in fabric.switches:
            apply_entries(entries(fabric, switch.name), program)
            assert len(program.tables["ipv4_route"].entries()) == len(fabric.hosts)


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ({"drop_at": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)}, "the more valuable class 1 would be dropped first"),
        ({"drop_at": (0.5,)}, "1 values; it needs 7"),
        ({"ecn_at": 1.2}, "fractions of a queue's depth"),
        ({"by_queue": {9: Thresholds()}}, "a queue must be in"),
    ],
)
def test_policy_that_contradicts_itself_is_refused(policy, says):
    with pytest.raises(PolicyError, match=says):
        Policy(**policy)
