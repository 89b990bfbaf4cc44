# SPDX-License-Identifier: Apache-2.0
"""Nodes of a cluster on one machine: network namespaces with interfaces, a host name and an /etc/hosts of their own."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from dlcp.host import netlab
from dlcp.host.ip import IPV4, IPV6, family_of

ROOT = Path(__file__).parents[2]


class Nodes:
    """Nodes on networks; a context manager.

    ``interfaces`` says which addresses of /24 networks each node has, by interface, or of /64 networks of IPv6, which
    the node then has alone: nodes whose addresses begin alike are on one network. ``hosts`` is what /etc/hosts says on
    a node. ``run(name)`` are the words before a command that is to run there; ``file(name)`` is an executable that runs
    its arguments there.
    """

    def __init__(self, folder, interfaces, hosts):
        works, reason = netlab.available()
        if not works or not shutil.which("unshare"):
            pytest.skip(f"needs network namespaces and unshare: {reason}")
        self.folder, self.interfaces, self.hosts = Path(folder), interfaces, hosts
        self.spaces = {}

    def __enter__(self):
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for space in self.spaces.values():
            space.close()

    def _make(self):
        self.switch = self.spaces["the switch"] = netlab.Namespace("switch")
        bridges = set()
        for number, (name, interfaces) in enumerate(self.interfaces.items()):
            family = family_of(next(iter(interfaces.values())))
            node = self.spaces[name] = netlab.Namespace(name, family)
            for interface, address in interfaces.items():
                bridge, bits = f"net{re.split('[.:]', address)[1]}", {IPV4: 24, IPV6: 64}[family]
                if bridge not in bridges:
                    self.switch.ip(f"link add {bridge} type bridge", f"link set {bridge} up")
                    bridges.add(bridge)
                port = f"{bridge}-{number}"
                self.switch.ip(
                    f"link add {port} type veth peer name {interface} netns {node.path}",
                    f"link set {port} master {bridge} up",
                )
                dad = " nodad" * (family is IPV6)  # else the address cannot be used at once
                node.ip(f"addr add {address}/{bits} dev {interface}{dad}", f"link set {interface} up")
            (self.folder / f"hosts-{name}").write_text(f"{family.loopback} localhost\n" + self.hosts(name))
            # The namespace of mounts is for /etc/hosts, that of names for the host's own.
            enter = f"nsenter --net={node.path} unshare --mount --uts sh -c"
            inside = f'mount --bind {self.folder}/hosts-{name} /etc/hosts && hostname {name} && exec "$@"'
            script = self.file(name)
            script.write_text(f'#!/bin/sh\nexec {enter} {shlex.quote(inside)} {name} "$@"\n')
            script.chmod(0o755)

    def file(self, name):
        return self.folder / f"on-{name}"

    def popen(self, name, words, **variables):
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("DLCP_", "PET_", "MASTER_"))}
        return subprocess.Popen(
            [str(self.file(name)), *map(str, words)],
            cwd=ROOT,
            env={**kept, "PYTHONPATH": str(ROOT), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def sent_bytes(self, name, interface):
        """Return how much an interface has sent so far."""
        found = self.spaces[name].run(["ip", "-s", "-j", "link", "show", interface], capture_output=True, text=True)
        return json.loads(found.stdout)[0]["stats64"]["tx"]["bytes"]


def finished(processes, timeout_s=100):
    """Return what processes printed, once all have ended; fail if one failed."""
    found = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=timeout_s)
            assert process.returncode == 0, out + err
            found.append(out + err)
    finally:
        for process in processes:
            kill(process)
    return found


def descendants(pid):
    """Return the processes that a process has started, and those that these have started."""
    with contextlib.suppress(OSError):
        children = " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")).split()
        return [found for child in map(int, children) for found in (child, *descendants(child))]
    return []


def kill(process):
    """Kill an agent and its ranks at once, as when a node loses power: the ranks are in sessions of their own."""
    for pid in (process.pid, *descendants(process.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(30)


@contextlib.contextmanager
def started(words, **options):
    """A process, which is ended with all that it has started; options as for ``subprocess.Popen``."""
    process = subprocess.Popen(words, **options)
    try:
        yield process
    finally:
        kill(process)
