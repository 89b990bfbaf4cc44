# SPDX-License-Identifier: Apache-2.0
import random
from collections import Counter
from dataclasses import replace

from dlcp.controller.entries import next_hop_mac, next_hops, port_mac, spray_groups
from dlcp.controller.fabric import Fabric, FabricSwitch, Host, Link, Port, distances, leaf_spine, stages_between, star


def test_star_has_one_port_for_each_host():
    assert next_hops(star(3), "switch") == {"host0": (1,), "host1": (2,), "host2": (3,)}


def test_leaves_spray_over_all_spines_and_spines_over_nothing():
    fabric = leaf_spine(3, 2, 2)
    assert next_hops(fabric, "leaf2") == {
        "host0": (3, 4),
        "host1": (3, 4),
        "host2": (1,),
        "host3": (2,),
        "host4": (3, 4),
        "host5": (3, 4),
    }
    assert next_hops(fabric, "spine1") == {f"host{k}": (k // 2 + 1,) for k in range(6)}
    assert distances(fabric, "leaf1") == {"leaf1": 0, "spine1": 1, "spine2": 1, "leaf2": 2, "leaf3": 2}


def test_a_shorter_path_is_taken_alone():
    fabric = leaf_spine(2, 2, 1)
    fabric = replace(fabric, links=(*fabric.links, Link("leaf1:9", "leaf2:9")))
    assert next_hops(fabric, "leaf1")["host1"] == (9,)


def test_sets_of_ports_share_a_group_whose_number_follows_from_the_ports():
    hops = next_hops(leaf_spine(3, 2, 2), "leaf2")
    groups = spray_groups(hops)
    assert set(groups) == {(1,), (2,), (3, 4)}
    assert [groups[(1,)], groups[(2,)]] == [1, 2]
    assert groups[(3, 4)] > 63
    other = spray_groups({"a": (3, 4), "b": (3, 4, 5), "c": (9,)})
    assert other[(3, 4)] == groups[(3, 4)]
    assert len(set(other.values())) == 3


def test_next_hop_addresses_are_those_of_the_other_end():
    fabric = leaf_spine(2, 2, 1)
    assert next_hop_mac(fabric, Port("leaf1", 1)) == 0x020000000001
    assert next_hop_mac(fabric, Port("leaf1", 2)) == port_mac(fabric, Port("spine1", 1)) == 0x020001000201
    ports = [Port(switch, number) for switch, ports in fabric.neighbours.items() for number in ports]
    assert max(Counter(port_mac(fabric, port) for port in ports).values()) == 1


def random_fabric(seed):
    """A connected fabric of random links, with a host at each switch's port 1."""
    draw = random.Random(seed)
    count = draw.randint(2, 9)
    switches = tuple(FabricSwitch(f"s{k}") for k in range(count))
    hosts = tuple(map(Host.numbered, range(count)))
    used = [1] * count
    links = [Link(f"s{k}:1", f"host{k}") for k in range(count)]
    pairs = [(k, draw.randrange(k)) for k in range(1, count)]
    pairs += [tuple(draw.sample(range(count), 2)) for _ in range(draw.randint(0, 2 * count))]
    for a, b in pairs:
        used[a] += 1
        used[b] += 1
        links.append(Link(f"s{a}:{used[a]}", f"s{b}:{used[b]}"))
    return Fabric(switches, hosts, tuple(links))


def test_every_way_that_the_next_hops_allow_ends_at_the_host_after_the_fewest_switches():
    for seed in range(30):
        fabric = random_fabric(seed)
        hops = {switch.name: next_hops(fabric, switch.name) for switch in fabric.switches}
        for start in fabric.switches:
            far = distances(fabric, start.name)
            for host in fabric.hosts:
                at = {start.name}
                for _ in range(far[fabric.attachments[host.name].switch]):
                    ends = [fabric.neighbours[here][port].port for here in at for port in hops[here][host.name]]
                    at = {end.switch for end in ends}
                [edge] = at
                assert [fabric.neighbours[edge][port].host for port in hops[edge][host.name]] == [host]


def test_no_message_crosses_other_switches():
    for seed in range(30):
        fabric = random_fabric(seed)
        hops = {switch.name: next_hops(fabric, switch.name) for switch in fabric.switches}
        found = {
            (stages[0][0], stages[-1][0]): {name for stage in stages for name in stage}
            for stages in stages_between(fabric)
        }
        for start in fabric.switches:
            for host in fabric.hosts:
                met, at = {start.name}, {start.name}
                end = fabric.attachments[host.name].switch
                while at != {end}:
                    ends = [fabric.neighbours[here][port].port for here in at for port in hops[here][host.name]]
                    at = {port.switch for port in ends}
                    met |= at
                assert met == found[tuple(sorted((start.name, end)))]
