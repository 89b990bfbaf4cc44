# SPDX-License-Identifier: Apache-2.0
"""Which addresses ranks have: those that the kernel's routes say, whatever the names of hosts lead to."""

import json
import socket
import sys

import pytest

from dlcp.host.ip import IPV4, IPV6
from dlcp.inputs.addresses import format_address
from dlcp.session import NotJoinedError, addresses
from dlcp.session.addresses import OwnAddresses, RankPlace, advertised, family_clash, own_addresses, own_place
from dlcp.session.options import Options
from tests.cluster.nodes import Nodes, finished
from tests.families import needs_ipv6
from tests.group.group_ranks import together
from tests.train.preloaded import Preloaded

AVERAGE = """
import json, sys
import numpy as np
import dlcp.session

options = dlcp.session.Options(fallback=False, meet_s=40, silence_s=40, shared_memory=False)
with dlcp.session.join(options) as group:
    group.register(["w"])
    values = np.full(100_000, group.rank, np.float32)
    group.average({"w": values})
    peers = {rank: host for rank, (host, _) in group.endpoint.connection.membership.peers.items()}
    found = {"mean": float(values.mean()), "peers": peers, "bound": group.endpoint._socket.getsockname()[0]}
    group.barrier()
print(json.dumps(found))
"""
PORT = "29555"
pytestmark = pytest.mark.timeout(500)


@pytest.fixture
def routes(monkeypatch):
    """The routes of a host on two networks, in the place of the kernel's."""

    def route(toward):
        host, _ = toward
        if host == "nowhere":
            raise OSError("Network is unreachable")
        destination = {"node-a": "127.0.1.1"}.get(host, host)
        known = {"10.71.": "10.71.0.1", "10.72.": "10.72.0.1", "127.": "127.0.0.1"}
        return next(own for prefix, own in known.items() if destination.startswith(prefix)), destination

    monkeypatch.setattr(addresses, "route_to", route)


def test_a_place_is_what_the_options_say_or_the_route(routes):
    assert own_place(Options(bind="10.9.9.9:5"), ("node-a", 0)) == RankPlace("10.9.9.9", settled=True)
    assert own_place(Options(), ("10.72.0.9", 0)) == RankPlace("10.72.0.1")
    assert own_place(Options(), ("10.72.0.1", 0)) == RankPlace("10.72.0.1", at_meeting=True)
    assert own_place(Options(), ("node-a", 0)) == RankPlace("127.0.0.1", at_meeting=True)
    with pytest.raises(OSError, match="unreachable"):
        own_place(Options(), ("nowhere", 0))


def test_a_link_local_address_is_no_place(monkeypatch):
    monkeypatch.setattr(addresses, "route_to", lambda toward: ("fe80::2%eth0", toward[0]))
    with pytest.raises(OSError, match="reaches fd00::1 from fe80::2%eth0, which is link-local"):
        own_place(Options(), ("fd00::1", 0))


HERE, LOOPBACK = RankPlace("10.71.0.1", at_meeting=True), RankPlace("127.0.0.1", at_meeting=True)


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        # A name led to the wrong network, or to loopback: the route to a peer is right.
        ([HERE, RankPlace("10.72.0.2")], OwnAddresses("10.72.0.1")),
        ([LOOPBACK, RankPlace("10.72.0.2"), LOOPBACK], OwnAddresses("10.72.0.1")),
        ([LOOPBACK, LOOPBACK], OwnAddresses("127.0.0.1")),
        # Between two networks.
        ([HERE, RankPlace("10.71.0.2"), RankPlace("10.72.0.3")], OwnAddresses("10.71.0.1", {2: "10.72.0.1"})),
        ([LOOPBACK, RankPlace("10.72.0.2"), RankPlace("10.71.0.3")], OwnAddresses("10.71.0.1", {1: "10.72.0.1"})),
        # Not where ranks meet: the way there is the way to the ranks there, of which nothing else is known.
        ([RankPlace("10.72.0.1"), LOOPBACK, RankPlace("10.72.0.1"), RankPlace("10.72.0.9")], OwnAddresses("10.72.0.1")),
        ([RankPlace("10.72.0.1"), RankPlace("10.71.0.9")], OwnAddresses("10.71.0.1")),
        ([RankPlace("10.72.0.1"), RankPlace("nowhere")], OwnAddresses("10.72.0.1")),
        ([RankPlace("10.9.9.9", settled=True), RankPlace("10.71.0.9")], OwnAddresses("10.9.9.9")),
    ],
)
def test_addresses_follow_from_where_all_ranks_are(routes, places, expected):
    assert own_addresses(0, dict(enumerate(places))) == expected


def test_an_advertised_address_is_for_all_peers():
    own = OwnAddresses("10.71.0.1", {2: "10.72.0.1"})
    assert advertised(Options(), own, 7) == (("10.71.0.1", 7), {2: "10.72.0.1"})
    assert advertised(Options(advertise="10.0.0.1"), own, 7) == (("10.0.0.1", 7), {})
    assert advertised(Options(advertise="10.0.0.1:99"), own, 7) == (("10.0.0.1", 99), {})


@needs_ipv6
@pytest.mark.parametrize("listens", [IPV4, IPV6, None])
def test_of_a_name_with_both_families_the_one_counts_in_which_the_store_was_reached(monkeypatch, listens):
    monkeypatch.setattr(addresses, "resolve", lambda host: [IPV6.loopback, IPV4.loopback])
    if listens is None:
        assert own_place(Options(), ("both", 9)).address == IPV6.loopback
        return
    with (
        socket.create_server((listens.loopback, 0), family=listens.number) as store,
        socket.create_connection(store.getsockname()[:2]) as connection,
    ):
        assert own_place(Options(), ("both", connection.getpeername()[1])).address == listens.loopback


def test_ranks_of_both_families_are_named():
    four, six, local = "10.72.0.1", "fd00:72::2", "127.0.0.1"
    assert family_clash({0: local, 3: six, 5: "fd00:72::3"}) == family_clash({0: four, 1: local}) == ""
    found = family_clash({0: local, 1: six, 2: "fd00:72::3", 4: four})
    assert found.startswith("rank 1 has an address of IPv6 (fd00:72::2), and rank 4 one of IPv4 (10.72.0.1), but")


@needs_ipv6
def test_ranks_of_both_families_do_not_join():
    hosts = ["127.0.0.1", "[::1]"]
    options = [Options(bind=f"{host}:0", fallback=False, meet_s=20) for host in hosts]
    with pytest.raises(NotJoinedError, match=r"rank 0 has an address of IPv4 \(127\.0\.0\.1\), and rank 1 one of IPv6"):
        together(2, lambda group: group.rank, options)


def average_on(nodes, masters):
    """Let a rank on each node join and average; return what each found."""
    ranks = []
    for rank, (name, master) in enumerate(masters.items()):
        where = {"MASTER_ADDR": master, "MASTER_PORT": PORT, "RANK": str(rank), "WORLD_SIZE": str(len(masters))}
        where["DLCP_SECRET"] = "known to the nodes of this test"
        ranks.append(nodes.popen(name, [sys.executable, "-c", AVERAGE], **where))
    found = [json.loads(text.splitlines()[-1]) for text in finished(ranks)]
    assert {one["mean"] for one in found} == {(len(masters) - 1) / 2}
    return found


def test_a_name_that_leads_to_loopback_on_its_own_host_does_no_harm(tmp_path):
    """As Debian writes it into /etc/hosts: 127.0.1.1 is the host itself, by name."""
    interfaces = {"node-a": {"eth0": "10.72.0.1"}, "node-b": {"eth0": "10.72.0.2"}}

    def hosts(name):
        return f"127.0.1.1 {name}\n" + ("10.72.0.1 node-a\n" if name != "node-a" else "")

    with Nodes(tmp_path, interfaces, hosts) as nodes:
        first, second = average_on(nodes, {"node-a": "node-a", "node-b": "node-a"})
    assert (first["bound"], second["bound"]) == ("10.72.0.1", "10.72.0.2")
    assert (first["peers"], second["peers"]) == ({"1": "10.72.0.2"}, {"0": "10.72.0.1"})


def test_a_rank_between_two_networks_has_an_address_in_each(tmp_path):
    interfaces = {
        "node-a": {"eth0": "10.71.0.1", "eth1": "10.72.0.1"},
        "node-b": {"eth0": "10.71.0.2"},
        "node-c": {"eth0": "10.72.0.3"},
    }
    with Nodes(tmp_path, interfaces, lambda name: "") as nodes:
        nodes.spaces["node-a"].sysctl("net/ipv4/ip_forward", "1")
        nodes.spaces["node-b"].ip("route add default via 10.71.0.1")
        nodes.spaces["node-c"].ip("route add default via 10.72.0.1")
        found = average_on(nodes, dict.fromkeys(interfaces, "10.71.0.1"))
    assert [one["bound"] for one in found] == ["0.0.0.0", "10.71.0.2", "10.72.0.3"]
    assert [one["peers"].get("0") for one in found] == [None, "10.71.0.1", "10.72.0.1"]


def test_ranks_without_ipv4_meet_by_name(tmp_path):
    interfaces = {"node-a": {"eth0": "fd00:72::1"}, "node-b": {"eth0": "fd00:72::2"}}
    with Nodes(tmp_path, interfaces, lambda _: "fd00:72::1 node-a\n") as nodes:
        first, second = average_on(nodes, dict.fromkeys(interfaces, "node-a"))
    assert (first["bound"], second["bound"]) == ("fd00:72::1", "fd00:72::2")
    assert (first["peers"], second["peers"]) == ({"1": "fd00:72::2"}, {"0": "fd00:72::1"})


TRAINING = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(50_000, 10))
for _ in range(3):
    model(torch.ones(1, 50_000)).sum().backward()
dist.all_reduce(torch.ones(500_000))  # by Gloo
dist.destroy_process_group()
"""
GRADIENT_BYTES = 2_000_000


@pytest.mark.parametrize(("slow", "fast"), [("10.71.0.", "10.72.0."), ("fd00:71::", "fd00:72::")], ids=["IPv4", "IPv6"])
def test_the_network_of_the_rendezvous_is_used_where_names_lead_to_another(tmp_path, slow, fast):
    """pytorch/gloo#335: the slow network is the one that names of hosts lead to."""
    pytest.importorskip("torch")
    (tmp_path / "script.py").write_text(TRAINING)
    interfaces = {
        f"node-{name}": {"slow": f"{slow}{number}", "fast": f"{fast}{number}"} for number, name in enumerate("ab", 1)
    }

    def hosts(_):
        return "".join(f"{addresses['slow']} {name}\n" for name, addresses in interfaces.items())

    with Preloaded() as python, Nodes(tmp_path, interfaces, hosts) as nodes:
        words = [*python, "-m", "dlcp.cli", "train", "--option", "precision=32", "--nnodes", "2"]
        words += ["--nproc-per-node", "1"]
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", format_address((f"{fast}1", PORT)), "--rdzv-id", "x"]
        running = [nodes.popen(name, [*words, "--", tmp_path / "script.py"]) for name in interfaces]
        told = finished(running, 400)
        sent = {(name, side): nodes.sent_bytes(name, side) for name in interfaces for side in ("slow", "fast")}
    assert all("none, all steps went over DLCP" in text for text in told)
    for name in interfaces:
        assert sent[name, "fast"] > 4 * GRADIENT_BYTES / 2, "half of each of three gradients, and of what Gloo sums"
        assert sent[name, "slow"] < 10_000, "no more than neighbours that look for each other"
