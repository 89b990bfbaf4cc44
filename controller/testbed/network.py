# SPDX-License-Identifier: Apache-2.0
"""Mininet's nodes and links for a layout, with switches that run as separate programs."""

from typing import TYPE_CHECKING, Any

from dlcp.controller.testbed.layout import HostPlan, Layout, PortPlan, ProcessId, StartedSwitch, StateFile, SwitchPlan
from dlcp.controller.testbed.proxy import NamespaceProxy
from dlcp.controller.testbed.requirements import load_mininet, mininet_network
from dlcp.controller.testbed.switches import PORT_BURST_BYTES, PORT_LIMIT_BYTES, SwitchProgram, make
from dlcp.netlab import CONGESTION_CONTROL, HOST_INTERFACE, NamedNamespace

if TYPE_CHECKING:

    class _Switch:
        """The parts of ``mininet.node.Switch`` used here; Mininet has no type hints."""

        def __init__(self, name: str, **params: Any) -> None: ...
        def stop(self, *args: Any, **options: Any) -> None: ...

else:
    _Switch = load_mininet("node").Switch


class ProgramSwitch(_Switch):
    """A Mininet switch that is a process of its own over the interfaces of its namespace.

    Parameters
    ----------
    name
        Mininet's name for it.
    program
        The program that implements it.
    """

    def __init__(self, name: str, *, program: SwitchProgram, **params: Any) -> None:
        super().__init__(name, dpid=f"{program.plan.device_id:x}", **params)
        self.program = program

    def start(self, controllers: object) -> None:
        """Start the program; it needs none of Mininet's controllers."""
        self.program.start()

    def stop(self, *args: Any, **options: Any) -> None:
        """End the program; Mininet removes the interfaces and the shell."""
        self.program.stop()
        super().stop(*args, **options)

    def connected(self) -> bool:
        """Return whether the program runs."""
        return self.program.running


class Network:
    """A running Mininet network.

    Parameters
    ----------
    layout
        The network to build.
    files
        Files for the state, where the switches' processes are recorded, and for the logs.
    """

    def __init__(self, layout: Layout, files: StateFile) -> None:
        self._layout = layout
        self._files = files
        self._mininet = mininet_network()
        self._programs = {plan.name: make(layout.kind, plan, files) for plan in layout.switches}
        self._restarts = dict.fromkeys(self._programs, 0)
        self._proxy: NamespaceProxy | None = None

    def start(self) -> None:
        """Build everything and start the switches.

        Raises
        ------
        TestbedError
            A part could not be created.
        """
        nodes = {plan.name: self._add_switch(plan) for plan in self._layout.switches}
        nodes |= {plan.name: self._add_host(plan) for plan in self._layout.hosts}
        for host in self._layout.hosts:
            self._add_link((nodes[host.name], HOST_INTERFACE), (nodes[host.switch], self._port(host)))
        for trunk in self._layout.trunks:
            first, second = ((nodes[name], self._interface(name, port)) for name, port in trunk)
            self._add_link(first, second)
        self._mininet.build()
        for host in self._layout.hosts:
            self._introduce(host)
        for switch in self._layout.switches:
            for port in switch.ports:
                self._prepare_port(switch, port)
        self._mininet.start()
        for name in self._programs:
            self._note(name)
        self._proxy = NamespaceProxy([port for program in self._programs.values() for port in program.forwarded])

    def supervise(self) -> None:
        """Restart each switch that has exited. It starts empty, as after a power cycle."""
        for name, program in self._programs.items():
            if not program.running:
                self._restarts[name] += 1
                program.start()
                self._note(name)

    def stop(self) -> None:
        """End the switches and remove everything."""
        if self._proxy is not None:
            self._proxy.close()
        for program in self._programs.values():
            program.stop()
        self._mininet.stop()

    def _note(self, name: str) -> None:
        process = ProcessId.of(self._programs[name].pid)
        self._files.update_switch(name, StartedSwitch(process, self._restarts[name]))

    def _add_switch(self, plan: SwitchPlan) -> Any:
        node = self._mininet.addSwitch(
            plan.name, cls=ProgramSwitch, program=self._programs[plan.name], inNamespace=True
        )
        return self._named(node, plan.namespace)

    def _add_host(self, plan: HostPlan) -> Any:
        # No address here: Mininet would set it with ifconfig, which cannot choose the route.
        return self._named(self._mininet.addHost(plan.name, ip=None), plan.namespace)

    def _named(self, node: Any, name: str) -> Any:
        namespace = NamedNamespace(name)
        namespace.attach(node.pid)
        namespace.prepare()
        return node

    def _add_link(self, first: tuple[Any, str], second: tuple[Any, str]) -> None:
        self._mininet.addLink(first[0], second[0], intfName1=first[1], intfName2=second[1])

    def _port(self, host: HostPlan) -> str:
        return self._interface(host.switch, host.port)

    def _interface(self, switch: str, port: int) -> str:
        return next(plan.interface for plan in self._layout.switch(switch).ports if plan.number == port)

    def _introduce(self, host: HostPlan) -> None:
        """Set a host's address, routes and neighbours, so that no ARP crosses the switches."""
        namespace = NamedNamespace(host.namespace)
        commands = [
            f"link set {HOST_INTERFACE} down",
            f"link set {HOST_INTERFACE} address {host.mac} mtu {self._layout.mtu_bytes} up",
            f"addr add {host.address}/32 dev {HOST_INTERFACE}",
        ]
        for other in self._layout.hosts:
            if other is not host:
                commands += [
                    f"route replace {other.address}/32 dev {HOST_INTERFACE} src {host.address} "
                    f"congctl {CONGESTION_CONTROL}",
                    f"neigh replace {other.address} lladdr {other.mac} dev {HOST_INTERFACE} nud permanent",
                ]
        namespace.ip(*commands)
        namespace.turn_off_offloads(HOST_INTERFACE)

    def _prepare_port(self, switch: SwitchPlan, port: PortPlan) -> None:
        namespace = NamedNamespace(switch.namespace)
        namespace.ip(f"link set {port.interface} mtu {self._layout.mtu_bytes} up")
        namespace.turn_off_offloads(port.interface)
        if self._layout.kind == "bmv2":
            namespace.limit_rate(
                port.interface, port.rate_bps, burst_bytes=PORT_BURST_BYTES, limit_bytes=PORT_LIMIT_BYTES
            )
