# SPDX-License-Identifier: Apache-2.0
"""BMv2's simple_switch as a thing that answers packets: its own process in its own network namespace.

Packets go through the nanomsg socket that ``--packet-in`` opens instead of network interfaces, so they may have any
length and come from any port, and no kernel queue can lose them. Entries, registers and counters go through Thrift.
"""

import json
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dlcp.host.closing import Closing
from dlcp.host.netlab import Namespace
from dlcp.host.processes import end
from dlcp.switch import parse_match, parse_number
from tests.conformance import packet_socket
from tests.conformance.bmv2_program import Layout, thrift_modules
from tests.conformance.packet_socket import PacketSocket
from tests.conformance.recording import State

DEADLINE_S = 15.0
STOP_DEADLINE_S = 5.0
DEPTH_PACKETS = 64
"""Default depth of a queue."""
_PRIORITY_MAX = 1 << 24
_PIPELINED = 256
"""Requests that are sent before their answers are read."""


class SwitchError(RuntimeError):
    """simple_switch cannot be used, or did not do as expected."""


def available() -> tuple[bool, str]:
    """Say whether simple_switch can be run here, and if not, what is missing."""
    if shutil.which("simple_switch") is None:
        return False, "simple_switch is not on PATH"
    if not packet_socket.available():
        return False, "libnanomsg is missing"
    try:
        thrift_modules()
    except ImportError as error:
        return False, f"BMv2's Thrift modules are missing: {error}"
    return True, ""


def mortal(command: Sequence[str], namespace: Namespace | None = None) -> list[str]:
    """Return a command that does the same, in a namespace if one is given, and ends when this process does.

    However this process ends: nothing is left behind by a test that is killed. Only the main thread may start it, for
    the kernel takes the end of the thread that did for the end of the process.
    """
    enter = ["nsenter", f"--net={namespace.path}"] if namespace is not None else []
    bound = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
    return [*enter, *bound, *command]


def version() -> str:
    """Return what simple_switch says of itself."""
    said = subprocess.run(["simple_switch", "--version"], capture_output=True, text=True, check=False).stdout.split()
    return f"simple_switch {said[0] if said else 'of unknown version'}"


class SimpleSwitch(Closing):
    """A running simple_switch with eight priority queues a port; a context manager.

    Parameters
    ----------
    program
        What it runs, compiled.
    device_id
        If given it is simple_switch_grpc, which answers P4Runtime at ``grpc_address`` as that device, and waits there
        for its program.
    """

    def __init__(self, program: Path, *, device_id: int | None = None) -> None:
        works, reason = available()
        if not works:
            raise SwitchError(reason)
        self.layout = Layout(program)
        self._thrift = thrift_modules()
        self._directory = tempfile.TemporaryDirectory(prefix="dlcp-conformance-")
        self._process: subprocess.Popen[bytes] | None = None
        self._packets: PacketSocket | None = None
        self._namespace = Namespace("simple_switch")
        try:
            address = f"ipc://{self._directory.name}/packets"
            self.grpc_address = f"unix:{self._directory.name}/grpc"
            command = ["simple_switch" if device_id is None else "simple_switch_grpc"]
            command += ["--packet-in", address, "--thrift-port", "9090", "--log-level", "off"]
            command += ["--notifications-addr", f"ipc://{self._directory.name}/notifications"]
            command += [str(program)] if device_id is None else ["--no-p4", "--device-id", str(device_id)]
            command += ["--", "--priority-queues", "8"]
            command += [] if device_id is None else ["--grpc-server-addr", self.grpc_address]
            self._process = subprocess.Popen(
                mortal(command, self._namespace), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            self._transport = self._connect()
            self._packets = PacketSocket(address)
        except BaseException:
            self.close()
            raise
        protocol = self._thrift["TBinaryProtocol"].TBinaryProtocol(self._transport)
        multiplexed = self._thrift["TMultiplexedProtocol"].TMultiplexedProtocol
        self._standard = self._thrift["Standard"].Client(multiplexed(protocol, "standard"))
        self._simple = self._thrift["SimpleSwitch"].Client(multiplexed(protocol, "simple_switch"))
        self._handles: dict[tuple[str, str, int], int] = {}
        self._members: dict[tuple[str, int], int] = {}
        self._groups: dict[tuple[str, int], tuple[int, list[int]]] = {}

    def close(self) -> None:
        """End the process and let the namespace go."""
        if self._packets is not None:
            self._packets.close()
        if self._process is not None:
            end(self._process, STOP_DEADLINE_S)
        self._namespace.close()
        self._directory.cleanup()

    # --------------------------------------------------------------------------------------------------- packets

    def send(self, port: int, data: bytes) -> None:
        """Give the switch a packet."""
        assert self._packets is not None
        self._packets.send(port, data)

    def receive(self, wait_s: float) -> tuple[int, bytes] | None:
        """Return port and bytes of the next packet that comes out; None if none does in time."""
        assert self._packets is not None
        return self._packets.receive(wait_s)

    def check(self) -> None:
        """Raise SwitchError if the process has ended."""
        assert self._process is not None
        if self._process.poll() is not None:
            raise SwitchError(f"simple_switch ended with status {self._process.returncode}")

    def now_us(self) -> int:
        """Return the switch's clock, from which the time stamps of packets come."""
        return int(self._simple.get_time_elapsed_us())

    def set_queues(self, port: int, rate_pps: int = 0, depth_packets: int = DEPTH_PACKETS) -> None:
        """Set the rate (0: none) and depth of each queue of a port."""
        self._simple.set_egress_queue_depth(port, depth_packets)
        self._simple.set_egress_queue_rate(port, rate_pps)

    # --------------------------------------------------------------------------------------------------- entries

    def set_entries(self, entries: Mapping[str, Any]) -> None:
        """Remove all entries, members and groups, and write others; registers and counters stay."""
        # One by one: bm_mt_clear_entries does not tell members and groups that they are no longer used.
        for (table, _, _), handle in self._handles.items():
            self._delete(table, handle)
        for (profile, _), (group, _) in self._groups.items():
            self._standard.bm_mt_act_prof_delete_group(0, profile, group)
        for (profile, _), member in self._members.items():
            self._standard.bm_mt_act_prof_delete_member(0, profile, member)
        self._forget()
        for item in entries.get("profiles", ()):
            for member in item.get("members", ()):
                self.add_member(item["profile"], member["id"], member["action"], member.get("params", {}))
            for group in item.get("groups", ()):
                self.set_group(item["profile"], group["id"], group["members"])
        for entry in entries.get("entries", ()):
            self.change("insert", entry)

    def add_member(self, profile: str, member: int, action: str, params: Mapping[str, Any]) -> None:
        """Add a member to an action profile."""
        name = self.layout.full(profile, self.layout.profiles)
        self._members[name, member] = self._standard.bm_mt_act_prof_add_member(0, name, *self._action(action, params))

    def set_group(self, profile: str, group: int, members: list[int]) -> None:
        """Make a group, or give it other members, the new ones before the old ones go."""
        name = self.layout.full(profile, self.layout.profiles)
        if (name, group) not in self._groups:
            self._groups[name, group] = self._standard.bm_mt_act_prof_create_group(0, name), []
        handle, before = self._groups[name, group]
        for member in members:
            if member not in before:
                self._standard.bm_mt_act_prof_add_member_to_group(0, name, self._members[name, member], handle)
        for member in before:
            if member not in members:
                self._standard.bm_mt_act_prof_remove_member_from_group(0, name, self._members[name, member], handle)
        self._groups[name, group] = handle, list(members)

    def change(self, operation: str, entry: Mapping[str, Any]) -> None:
        """Insert, modify or delete an entry."""
        identity = self._identity(entry["table"], entry.get("match", {}), entry.get("priority", 0))
        table, _, priority = identity
        if operation == "delete":
            self._delete(table, self._handles.pop(identity))
            return
        if operation == "insert":
            types = self._thrift["types"]
            options = types.BmAddEntryOptions(_PRIORITY_MAX - priority if priority else None)
            self._handles[identity] = self._insert(table, self._key(table, entry), options, entry)
        else:
            self._modify(table, self._handles[identity], entry)
        if "meter" in entry:
            self.set_meter(entry["table"], entry.get("match", {}), priority, entry["meter"])

    def set_meter(self, table: str, match: Mapping[str, Any], priority: int, meter: Mapping[str, int]) -> None:
        """Set the direct meter of an entry."""
        identity = self._identity(table, match, priority)
        rate = self._thrift["types"].BmMeterRateConfig
        rates = [rate(meter["cir"] / 1e6, meter["cburst"]), rate(meter["pir"] / 1e6, meter["pburst"])]
        self._standard.bm_mt_set_meter_rates(0, identity[0], self._handles[identity], rates)

    def metered(self, table: str) -> bool:
        """Say whether the entries of a table have meters."""
        return bool(self.layout.tables[self.layout.full(table, self.layout.tables)].get("direct_meters"))

    def set_default(self, table: str, action: str, params: Mapping[str, Any]) -> None:
        """Set the default action of a table that has no action profile."""
        self._standard.bm_mt_set_default_action(
            0, self.layout.full(table, self.layout.tables), *self._action(action, params)
        )

    def _identity(self, table: str, match: Mapping[str, Any], priority: int) -> tuple[str, str, int]:
        return self.layout.full(table, self.layout.tables), json.dumps(match, sort_keys=True), priority

    def _insert(self, table: str, key: list[Any], options: Any, entry: Mapping[str, Any]) -> int:
        profile = self.layout.tables[table].get("action_profile")
        if "group" in entry:
            group, _ = self._groups[profile, entry["group"]]
            return int(self._standard.bm_mt_indirect_ws_add_entry(0, table, key, group, options))
        if "member" in entry:
            member = self._members[profile, entry["member"]]
            return int(self._standard.bm_mt_indirect_add_entry(0, table, key, member, options))
        action, arguments = self._action(entry["action"], entry.get("params", {}))
        return int(self._standard.bm_mt_add_entry(0, table, key, action, arguments, options))

    def _modify(self, table: str, handle: int, entry: Mapping[str, Any]) -> None:
        profile = self.layout.tables[table].get("action_profile")
        if "group" in entry:
            group, _ = self._groups[profile, entry["group"]]
            self._standard.bm_mt_indirect_ws_modify_entry(0, table, handle, group)
        elif "member" in entry:
            self._standard.bm_mt_indirect_modify_entry(0, table, handle, self._members[profile, entry["member"]])
        else:
            action, arguments = self._action(entry["action"], entry.get("params", {}))
            self._standard.bm_mt_modify_entry(0, table, handle, action, arguments)

    def _delete(self, table: str, handle: int) -> None:
        indirect = "action_profile" in self.layout.tables[table]
        client = self._standard
        (client.bm_mt_indirect_delete_entry if indirect else client.bm_mt_delete_entry)(0, table, handle)

    def _key(self, table: str, entry: Mapping[str, Any]) -> list[Any]:
        types = self._thrift["types"]
        kinds, match = types.BmMatchParamType, entry.get("match", {})
        params = []
        for key in self.layout.tables[table]["key"]:
            kind, width = key["match_type"], key["width"]
            size = (width + 7) // 8
            given = parse_match(match.get(key["name"], 0), kind, width) if key["name"] in match else (0, 0)
            if kind == "exact":
                exact = types.BmMatchParamExact(given.to_bytes(size, "big"))
                params.append(types.BmMatchParam(kinds.EXACT, exact=exact))
            elif kind == "lpm":
                lpm = types.BmMatchParamLPM(given[0].to_bytes(size, "big"), given[1])
                params.append(types.BmMatchParam(kinds.LPM, lpm=lpm))
            elif kind == "ternary":
                value, mask = (part.to_bytes(size, "big") for part in given)
                params.append(types.BmMatchParam(kinds.TERNARY, ternary=types.BmMatchParamTernary(value, mask)))
            else:
                raise SwitchError(f"{table} has a key of kind {kind}; teach this module about it")
        return params

    def _action(self, name: str, params: Mapping[str, Any]) -> tuple[str, list[bytes]]:
        full = self.layout.full(name, self.layout.actions)
        arguments = [
            parse_number(params[parameter]).to_bytes((width + 7) // 8, "big")
            for parameter, width in self.layout.actions[full]
        ]
        return full, arguments

    def _forget(self) -> None:
        self._handles.clear()
        self._members.clear()
        self._groups.clear()

    # ----------------------------------------------------------------------------------------------------- state

    def read_register(self, name: str, index: int) -> int:
        """Return one cell."""
        return int(self._standard.bm_register_read(0, self.layout.full(name, self.layout.registers), index))

    def write_register(self, name: str, index: int, value: int) -> None:
        """Write one cell."""
        self._standard.bm_register_write(0, self.layout.full(name, self.layout.registers), index, value)

    def read_counter(self, name: str, index: int) -> tuple[int, int]:
        """Return packets and bytes of one cell."""
        value = self._standard.bm_counter_read(0, self.layout.full(name, self.layout.counters), index)
        return int(value.packets), int(value.bytes)

    def reset_state(self) -> None:
        """Set registers and counters to zero; bm_reset_state would leave meters and groups in disorder (1.15.5)."""
        for name in self.layout.registers:
            self._standard.bm_register_reset(0, name)
        for name in self.layout.counters:
            self._standard.bm_counter_reset_all(0, name)

    def state(self) -> State:
        """Return every register and counter cell that is not zero."""
        registers = {
            name: {i: int(v) for i, v in enumerate(self._standard.bm_register_read_all(0, name)) if v}
            for name in self.layout.registers
        }
        counters = {name: dict(self._counted(name, size)) for name, size in self.layout.counters.items()}
        return State(registers, counters)

    def _counted(self, name: str, size: int) -> Iterator[tuple[int, tuple[int, int]]]:
        client = self._standard
        for start in range(0, size, _PIPELINED):
            indices = range(start, min(start + _PIPELINED, size))
            for index in indices:
                client.send_bm_counter_read(0, name, index)
            for index in indices:
                value = client.recv_bm_counter_read()
                if value.packets or value.bytes:
                    yield index, (value.packets, value.bytes)

    def _connect(self) -> Any:
        """Wait until the Thrift server listens, and return an open transport to it."""
        address = ("127.0.0.1", 9090)
        deadline = time.monotonic() + DEADLINE_S
        while True:
            assert self._process is not None
            if self._process.poll() is not None:
                raise SwitchError(f"simple_switch ended with status {self._process.returncode} before it answered")
            try:
                self._namespace.call(lambda: socket.create_connection(address, 1).close())
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise SwitchError(f"simple_switch does not listen on its Thrift port: {error}") from error
            time.sleep(0.05)
        transport = self._thrift["TTransport"].TBufferedTransport(self._thrift["TSocket"].TSocket(*address))
        self._namespace.call(transport.open)
        return transport
