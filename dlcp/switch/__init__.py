# SPDX-License-Identifier: Apache-2.0
"""The built-in switch: runs the compiled P4 program on sockets, without root, BMv2 or hardware.

This is the public interface, with the package `dlcp.switch.p4runtime` (control over P4Runtime; needs finsy).
Internally, ``executor`` turns a program into code and holds its tables and state, ``ports`` has queues and sockets, and
``forwarding`` and ``switch`` move packets between them.
"""

from dlcp.switch.built_in import READY, Switch, SwitchProcess, SwitchProcessError
from dlcp.switch.entry_files import (
    Entries,
    Profile,
    apply_entries,
    format_match,
    parse_entries,
    parse_match,
    parse_number,
    read_entries,
    read_ports,
    write_entries,
    write_ports,
)
from dlcp.switch.event_counters import (
    EVENT_COUNTERS,
    EgressEvent,
    EventCount,
    IngressEvent,
    decode_events,
    event_index,
    event_totals,
)
from dlcp.switch.executor.bmv2_json import PROGRAM_FOLDER, PROGRAM_PATH, load_definition
from dlcp.switch.executor.model import (
    Action,
    EntryError,
    GroupRef,
    MemberRef,
    MeterConfig,
    ProgramDef,
    ProgramError,
    TableEntry,
    UnknownNameError,
    UnsupportedFeatureError,
)
from dlcp.switch.executor.program import (
    BACKENDS,
    Backend,
    Program,
    cache_directory,
)
from dlcp.switch.forwarding import EmptyProgram
from dlcp.switch.ports import PortGroup
from dlcp.switch.ports.loopback import LoopbackHost, LoopbackPorts, internet_checksum, udp_headers
from dlcp.switch.ports.packet import PacketPort
from dlcp.switch.queues import DEPTH_PACKETS, DROP_PORT, QUEUES, PortQueueing

__all__ = [
    "BACKENDS",
    "DEPTH_PACKETS",
    "DROP_PORT",
    "EVENT_COUNTERS",
    "PROGRAM_FOLDER",
    "PROGRAM_PATH",
    "QUEUES",
    "READY",
    "Action",
    "Backend",
    "EgressEvent",
    "EmptyProgram",
    "Entries",
    "EntryError",
    "EventCount",
    "GroupRef",
    "IngressEvent",
    "LoopbackHost",
    "LoopbackPorts",
    "MemberRef",
    "MeterConfig",
    "PacketPort",
    "PortGroup",
    "PortQueueing",
    "Profile",
    "Program",
    "ProgramDef",
    "ProgramError",
    "Switch",
    "SwitchProcess",
    "SwitchProcessError",
    "TableEntry",
    "UnknownNameError",
    "UnsupportedFeatureError",
    "apply_entries",
    "cache_directory",
    "decode_events",
    "event_index",
    "event_totals",
    "format_match",
    "internet_checksum",
    "load_definition",
    "parse_entries",
    "parse_match",
    "parse_number",
    "read_entries",
    "read_ports",
    "udp_headers",
    "write_entries",
    "write_ports",
]
