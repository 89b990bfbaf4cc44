# SPDX-License-Identifier: Apache-2.0
import json
from dataclasses import replace

import pytest

from controller.fabric import FabricError, Host, Job, Star, load
from controller.policy import Policy, PolicyError, entries
from dlcp.switch.document import DocumentError
from dlcp.switch.queues import PortQueueing


def rows(star, table):
    return [entry for entry in entries(star).entries if entry.table == table]


def thresholds(star):
    return {
        (entry.match["queue"], entry.match["drop_class"]): entry.params["depth"]
        for entry in rows(star, "drop_threshold")
    }


def test_every_host_is_reached_through_a_group_at_its_port():
    star = Star.numbered(3)
    [profile] = entries(star).profiles
    members = {member.id: member.params for member in profile.members}
    groups = {group.id: group.members for group in profile.groups}
    for host in star.hosts:
        [route] = [row for row in rows(star, "ipv4_route") if row.match == {"ipv4_dst": f"{host.address}/32"}]
        [member] = groups[route.group]
        assert members[member] == {"port": host.port, "mac": host.mac}
        assert [row.params for row in rows(star, "ethernet_route") if row.match["ethernet_dst"] == host.mac] == [
            {"port": host.port}
        ]


def test_tags_are_believed_only_where_the_operator_says_so():
    star = Star.numbered(3)
    star = replace(star, hosts=(star.hosts[0], replace(star.hosts[1], trusted=False), star.hosts[2]))
    assert [row.match["ig_port"] for row in rows(star, "port_trust")] == [1, 3]


def test_less_valuable_classes_are_dropped_from_shallower_depths():
    limits = thresholds(Star.numbered(2, queueing=PortQueueing(rate_bps=10**9, depth_packets=100)))
    assert set(limits) == {(queue, drop_class) for queue in range(8) for drop_class in range(1, 8)}
    for queue in range(8):
        depths = [limits[queue, drop_class] for drop_class in range(1, 8)]
        assert depths == sorted(depths, reverse=True)
        assert len(set(depths)) == 7
        assert depths[-1] < depths[0] < 100


def test_thresholds_follow_the_shallowest_queue():
    deep, shallow = PortQueueing(10**9, 200), PortQueueing(10**9, tuple(range(10, 90, 10)))
    star = Star.numbered(2, queueing=deep)
    star = replace(star, hosts=(star.hosts[0], replace(star.hosts[1], queueing=shallow)))
    assert thresholds(star)[7, 1] == int(0.7 * 80)
    assert thresholds(star)[0, 1] == int(0.7 * 10)
    shared = replace(star.hosts[1], queueing=replace(deep, limit_packets=20))
    assert thresholds(replace(star, hosts=(star.hosts[0], shared)))[7, 1] == int(0.7 * 20)


def test_packets_are_marked_in_all_queues_but_that_of_control():
    star = Star.numbered(2, queueing=PortQueueing(10**9, 100), policy=Policy(ecn_at=0.2))
    assert {row.match["queue"]: row.params["depth"] for row in rows(star, "ecn_threshold")} == dict.fromkeys(
        range(7), 20
    )


def test_shares_become_a_data_and_a_control_meter_at_every_port():
    job = Job(7, share=0.8, control_share=0.1, shares={2: 0.5}, burst_s=0.02)
    star = Star.numbered(2, queueing=PortQueueing(rate_bps=80_000_000), jobs=[job])
    meters = {(row.match["eg_port"], row.match["control"]): row.meter for row in rows(star, "job_share")}
    assert {key: meter.cir for key, meter in meters.items()} == {
        (1, 0): 8_000_000,
        (2, 0): 5_000_000,
        (1, 1): 1_000_000,
        (2, 1): 1_000_000,
    }
    assert all(meter.pir == meter.cir and meter.cburst == meter.pburst == 200_000 for meter in meters.values())
    assert all(row.match["job"] == 7 for row in rows(star, "job_share"))


def test_burst_lets_a_job_send_back_to_back_even_on_a_slow_port():
    star = Star.numbered(1, queueing=PortQueueing(rate_bps=1_000_000), jobs=[Job(1)])
    assert all(row.meter.cburst == 8 * star.mtu_bytes for row in rows(star, "job_share"))


def test_ports_are_set_up_with_their_queueing():
    own = PortQueueing(rate_bps=5, loss=0.01)
    star = Star.numbered(2)
    star = replace(star, hosts=(replace(star.hosts[0], queueing=own), star.hosts[1]))
    assert entries(star).ports == {1: own, 2: star.queueing}


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ({"drop_at": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)}, "the more valuable class 1 would be dropped first"),
        ({"drop_at": (0.5,)}, "1 values; it takes 7"),
        ({"ecn_at": 1.2}, "shares of a queue's depth"),
    ],
)
def test_policy_that_contradicts_itself_is_refused(policy, says):
    with pytest.raises(PolicyError, match=says):
        Policy(**policy)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hosts": ()}, "without hosts"),
        ({"hosts": (Host.numbered(0), replace(Host.numbered(1), port=1))}, "port 1 is given 2 times"),
        ({"hosts": (Host.numbered(63),)}, "port 64 is not one of 1..63"),
        ({"jobs": (Job(1), Job(1))}, "id 1 is given 2 times"),
        ({"jobs": (Job(1, share=0.6), Job(2, share=0.5))}, r"port 1 \(host0\) add up to 1.2, more than 1"),
        ({"jobs": (Job(1, share=0.0),)}, "job 1: shares lie above 0"),
        ({"jobs": (Job(1),), "queueing": PortQueueing()}, "has no rate, so no job can have a share"),
    ],
)
def test_fabric_that_cannot_be_is_refused(changes, says):
    with pytest.raises(FabricError, match=says):
        replace(Star.numbered(2), **changes)


def test_fabric_is_read_from_a_file(tmp_path):
    path = tmp_path / "star.json"
    path.write_text(
        json.dumps(
            {
                "hosts": 2,
                "queueing": {"rate_bps": 100_000_000, "depth_packets": [1, 2, 3, 4, 5, 6, 7, 8]},
                "jobs": [{"id": 3, "share": 0.5, "shares": {"2": 0.25}}],
                "policy": {"ecn_at": 0.5},
            }
        )
    )
    assert load(path) == Star.numbered(
        2,
        queueing=PortQueueing(100_000_000, (1, 2, 3, 4, 5, 6, 7, 8)),
        jobs=[Job(3, 0.5, shares={2: 0.25})],
        policy=Policy(ecn_at=0.5),
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"hosts": 2,\n "ratebps": 3}', r"star.json:2: ratebps: there is no field 'ratebps'"),
        ('{"hosts": 2,\n "queueing":\n  {"rate_bps": "fast"}}', r"star.json:3: queueing.rate_bps: Expected `int`"),
        ('{"hosts": 2,\n "queueing":\n  {"ratebps": 1}}', r"star.json:3: .*did you mean rate_bps\?"),
        ('{"hosts": 2,\n "policy": {"ecn_at": 7}}', r"star.json:2: policy: .*shares of a queue's depth"),
        ('{"hosts": 2,\n "jobs": [{"id": 1},\n {"id": 1, "shar": 1}]}', r"star.json:3: jobs\[1\].shar: .*mean share"),
        ('{"hosts": 2,,}', r"star.json:1: .*column"),
    ],
)
def test_file_errors_say_where(tmp_path, text, says):
    path = tmp_path / "star.json"
    path.write_text(text)
    with pytest.raises(DocumentError, match=says):
        load(path)


def test_missing_file_says_so(tmp_path):
    with pytest.raises(DocumentError, match=r"none.json: No such file"):
        load(tmp_path / "none.json")
