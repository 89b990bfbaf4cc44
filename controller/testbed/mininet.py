# SPDX-License-Identifier: Apache-2.0
"""DLCP's switches in your own Mininet script, by three lines: an import, the switches' class, and a call.

::

    from dlcp.controller.testbed.mininet import DlcpSwitch, configure  # first: it finds Mininet for any Python
    from mininet.net import Mininet
    from mininet.topo import SingleSwitchTopo

    net = Mininet(topo=SingleSwitchTopo(k=4), switch=DlcpSwitch, controller=None)
    net.start()
    configure(net)
    net.pingAll()
    net.stop()

Until ``net.stop()``, the actions of ``dlcp testbed`` work on it too, as in ``dlcp testbed trace --name mininet h1 h2``.
"""

import contextlib
import dataclasses
import json
import os
import threading
from typing import Any, Final

from dlcp.controller.fabric import Fabric, FabricSwitch, Host, Link, SwitchKind
from dlcp.controller.testbed import TestbedError
from dlcp.controller.testbed.keeper import SUPERVISE_S, Switches
from dlcp.controller.testbed.layout import (
    RUN_FOLDER,
    HostLayout,
    Layout,
    ProcessId,
    StateFile,
    SwitchLayout,
    TestbedState,
    lay_out,
)
from dlcp.controller.testbed.lifecycle import FABRIC, Controller, with_addresses
from dlcp.controller.testbed.requirements import load_mininet, missing
from dlcp.controller.topology_files import LINK_OPTIONS, link_fields
from dlcp.host.closing import Closing
from dlcp.host.netlab import NamedNamespace

_MininetSwitch: Any = load_mininet("node").Switch
_RATE_MBPS: Final = 200.0
"""As in a fabric file."""
_STOP_DEADLINE_S: Final = 10.0


class DlcpSwitch(_MininetSwitch):  # type: ignore[misc]  # Mininet has no types
    """A switch of Mininet that runs DLCP's program once `configure` has been called.

    Parameters
    ----------
    name
        Any name.
    kind
        ``builtin``, or ``bmv2``; the same for all switches of a network.
    rate_mbps
        Rate of the ports whose links give no ``bw``, in Mbit/s.
    params
        As for Mininet's ``Switch``. It always has a namespace of its own.
    """

    def __init__(self, name: str, kind: SwitchKind = "builtin", rate_mbps: float = _RATE_MBPS, **params: Any) -> None:
        super().__init__(name, **{"dpid": "1", **params, "inNamespace": True})
        self.kind, self.rate_bps = kind, round(rate_mbps * 1e6)
        self.running: _Running | None = None

    def start(self, controllers: object) -> None:
        """Do nothing: the switches start in `configure`, which knows all hosts."""

    def stop(self, deleteIntfs: bool = True) -> None:  # noqa: N803 - Mininet's name
        """End the processes of all switches, and delete the interfaces."""
        if self.running is not None:
            self.running.close()
        super().stop(deleteIntfs)


def configure(net: Any, name: str = "mininet", **settings: Any) -> Fabric:
    """Start the switches of a Mininet network that has started, and program them for its hosts.

    ARP entries become static and offloads are turned off, which the switch program needs. Ports take rate, delay, loss
    and queue length from the links (``bw``, ``delay``, ``loss``, ``max_queue_size``), as with ``TCLink``.

    Parameters
    ----------
    net
        The ``mininet.net.Mininet``; all of its switches are of class `DlcpSwitch`.
    name
        Name of the testbed for ``dlcp testbed ... --name``.
    settings
        Further arguments of :class:`dlcp.controller.fabric.Fabric`, such as ``jobs`` and ``policy``.

    Returns
    -------
    The fabric, with the addresses of the switches' P4Runtime servers.

    Raises
    ------
    TestbedError
        A requirement is missing, a switch is of another class or does not start, or the name is in use.
    FabricError
        The network is not a fabric: a host has no link or several, for example.
    """
    others = [f"{each.name} is a {type(each).__name__}" for each in net.switches if not isinstance(each, DlcpSwitch)]
    kinds: set[SwitchKind] = {switch.kind for switch in net.switches if isinstance(switch, DlcpSwitch)}
    if others or len(kinds) != 1:
        wrong = others[0] if others else "there are two kinds" if kinds else "there is none"
        raise TestbedError(
            f"all switches must be DlcpSwitches of one kind, but {wrong}; use Mininet(switch=DlcpSwitch)"
        )
    (kind,) = kinds
    lacking = missing(kind)
    if lacking:
        raise TestbedError("DlcpSwitch needs the following:\n" + "\n".join(f"  {line}" for line in lacking))
    found = StateFile(name).read()
    if found is not None and found.alive:
        raise TestbedError(f"testbed {name!r} is up; end it, or choose another name in configure()")
    fabric = _fabric(net, settings)
    layout = lay_out(fabric, kind, name)
    hosts = tuple(dataclasses.replace(host, interface=net[host.name].defaultIntf().name) for host in layout.hosts)
    running = _Running(net, fabric, dataclasses.replace(layout, hosts=hosts))
    for switch in net.switches:
        switch.running = running
    return running.fabric


class _Running(Closing):
    """The processes of a network's switches, and the state by which ``dlcp testbed`` finds them."""

    def __init__(self, net: Any, fabric: Fabric, layout: Layout) -> None:
        self._files = StateFile(layout.name)
        self._files.remove()  # left over from a crashed script
        self._namespaces = [NamedNamespace(name) for name in layout.namespaces]
        self._switches = Switches(layout, self._files)
        self._stopped = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name="dlcp-switches", daemon=True)
        self.fabric = with_addresses(fabric, layout)
        state = TestbedState(layout, ProcessId.of(os.getpid()), tuple(layout.namespaces), is_script=True)
        self._files.write(state)
        try:
            self._start(net, layout)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes, and remove names and files."""
        self._stopped.set()
        if self._supervisor.is_alive():
            self._supervisor.join(_STOP_DEADLINE_S)
        self._switches.stop()
        for namespace in self._namespaces:
            if namespace.exists:
                namespace.detach()
        for path in RUN_FOLDER.glob(f"{self._files.name}.*"):
            path.unlink()

    def _start(self, net: Any, layout: Layout) -> None:
        plans: list[SwitchLayout | HostLayout] = [*layout.switches, *layout.hosts]
        for plan in plans:
            namespace = NamedNamespace(plan.namespace)
            namespace.attach(net[plan.name].pid)
            if isinstance(plan, HostLayout):
                namespace.turn_off_offloads(plan.interface)
            else:
                namespace.prepare()
        net.staticArp()
        self._switches.start()
        self._supervisor.start()
        self._files.path(FABRIC).write_text(json.dumps(dataclasses.asdict(self.fabric)), encoding="utf-8")
        Controller(self.fabric).close()
        state = self._files.read()
        assert state is not None
        self._files.write(dataclasses.replace(state, ready=True))

    def _supervise(self) -> None:
        while not self._stopped.wait(SUPERVISE_S):
            with contextlib.suppress(TestbedError):  # it is tried again
                self._switches.supervise()


def _fabric(net: Any, settings: dict[str, Any]) -> Fabric:
    """Return the hosts, switches and links of a network."""
    switches = tuple(
        FabricSwitch(
            switch.name,
            device_id=index + 1,
            interfaces={port: intf.name for port, intf in switch.intfs.items() if intf.link is not None},
        )
        for index, switch in enumerate(net.switches)
    )
    hosts = tuple(Host(host.name, str(host.IP()), str(host.MAC())) for host in net.hosts)
    return Fabric(switches, hosts, tuple(_link(link) for link in net.links), **settings)


def _link(link: Any) -> Link:
    ends, rate_bps = {}, 0
    for side, intf in (("a", link.intf1), ("b", link.intf2)):
        at_switch = isinstance(intf.node, DlcpSwitch)
        ends[side] = f"{intf.node.name}:{intf.node.ports[intf]}" if at_switch else intf.node.name
        rate_bps = intf.node.rate_bps if at_switch else rate_bps
    given = {name: link.intf1.params[name] for name in LINK_OPTIONS if link.intf1.params.get(name) is not None}
    fields: dict[str, Any] = {"rate_bps": rate_bps, **link_fields(given)}
    return Link(ends["a"], ends["b"], **fields)
