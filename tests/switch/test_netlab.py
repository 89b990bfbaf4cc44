# SPDX-License-Identifier: Apache-2.0
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def links():
    return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout


def text(host, *argv):
    return host.namespace.run(argv, capture_output=True, text=True).stdout


def test_star_is_built_as_promised_and_leaves_no_trace(namespaces):
    before, fds = links(), set(os.listdir("/proc/self/fd"))
    with namespaces.StarNetwork(3, mtu_bytes=1400) as network:
        assert [host.port for host in network.hosts] == [1, 2, 3]
        host = network.hosts[1]
        assert "10.0.0.2/24" in text(host, "ip", "-br", "addr", "show", "eth0")
        link = text(host, "ip", "-o", "link", "show", "eth0")
        assert "02:00:00:00:00:02" in link
        assert "mtu 1400" in link
        neighbours = text(host, "ip", "neigh").splitlines()
        assert sorted(line.split()[0] for line in neighbours) == ["10.0.0.1", "10.0.0.3"]
        assert all("PERMANENT" in line for line in neighbours)
        assert text(host, "cat", "/proc/net/if_inet6") == ""
        assert "UP" in text(host, "ip", "-br", "link", "show", "lo")
        switch_links = network.switch.run(["ip", "-br", "link"], capture_output=True, text=True).stdout
        assert [f"port{number}@" in switch_links for number in (1, 2, 3)] == [True] * 3
        assert links() == before
    assert links() == before
    assert set(os.listdir("/proc/self/fd")) == fds


def test_hosts_cannot_see_each_other_without_a_switch(namespaces):
    with namespaces.StarNetwork(2) as network:
        sock = network.hosts[0].namespace.call(lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        sock.settimeout(0.2)
        with pytest.raises(TimeoutError):
            sock.connect(("10.0.0.2", 5001))
        sock.close()


@pytest.mark.parametrize("name", ["cubic", "reno"])
def test_tcp_of_the_hosts_uses_the_congestion_control_asked_for(namespaces, name):
    try:
        namespaces.check_congestion_control(name)
    except namespaces.NamespaceError as error:
        pytest.skip(str(error))
    with namespaces.StarNetwork(1, congestion_control=name) as network:

        def used():
            with socket.socket() as server, socket.socket() as client:
                server.bind(("0.0.0.0", 0))
                client.setblocking(False)
                client.connect_ex(("10.0.0.9", 1))
                return client.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()

        assert network.hosts[0].namespace.call(used) == name


def test_unknown_congestion_control_is_refused_with_those_there_are(namespaces):
    with pytest.raises(namespaces.NamespaceError, match=r"'hybrid-8'; it has .*reno"):
        namespaces.StarNetwork(1, congestion_control="hybrid-8")


def test_nothing_survives_a_crash(namespaces):
    program = (
        "import os\nfrom dlcp.host.netlab import StarNetwork\nnetwork = StarNetwork(1)\n"
        "print(os.readlink(network.switch.path), flush=True)\nos.kill(os.getpid(), 9)"
    )
    crashed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY, check=False
    )
    assert crashed.returncode == -9
    name = crashed.stdout.strip()
    assert name.startswith("net:[")
    alive = set()
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            alive.add(os.readlink(path))
        except OSError:
            continue
    assert name not in alive


def test_a_user_namespace_is_root_enough(namespaces):
    # Root without its rights, but for the one that a map of user 0 takes (user_namespaces(7)).
    powerless = ["setpriv", "--bounding-set=-all,+setfcap", "--inh-caps=-all"]
    if os.geteuid() or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv, to give root's rights away")
    if subprocess.run([*powerless, "unshare", "--user", "--map-root-user", "true"], check=False).returncode:
        pytest.skip("user namespaces are not allowed here")
    program = (
        "from dlcp.host import netlab\nprint(netlab.available()[0])\nnetlab.become_root()\n"
        "with netlab.StarNetwork(2) as network:\n"
        "    print(network.hosts[1].namespace.run(['id', '-u'], capture_output=True, text=True).stdout)"
    )
    run = subprocess.run(
        [*powerless, sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY, check=False
    )
    # Run twice: the first time it finds that it may not, the second time as root of its own namespace.
    assert (run.returncode, run.stdout.split()) == (0, ["False", "True", "0"]), run.stderr


def test_error_names_the_command(namespaces):
    with (
        namespaces.StarNetwork(1) as network,
        pytest.raises(namespaces.NamespaceError, match=r"switch: ip link set ghost"),
    ):
        network.switch.ip("link set ghost up")


def test_a_named_namespace_is_entered_and_its_processes_end_with_it(namespaces):
    named = namespaces.NamedNamespace(f"dlcp-test-{os.getpid()}")
    holder = namespaces.Namespace("holder")
    process = holder.popen(["sleep", "600"])
    try:
        named.attach(process.pid)
    except namespaces.NamespaceError as error:
        process.kill()
        process.wait()
        pytest.skip(f"needs named namespaces: {error}")
    try:
        named.prepare()
        named.link("one", named, "two", mtu_bytes=1400)
        assert "mtu 1400" in named.run(["ip", "-o", "link", "show", "two"], capture_output=True, text=True).stdout
        assert named.pids() == [process.pid]
        assert named.clear() == 1
    finally:
        process.kill()
        process.wait()
        named.remove()
        holder.close()
    assert not named.exists
