# SPDX-License-Identifier: Apache-2.0
r"""Sets a Tofino up for a fabric over BF Runtime: ports, queues, depth reports and the program's entries.

Run it where both dlcp and the client of an SDE (the Python module ``bfrt_grpc``) can be imported, for each switch::

    python3 p4/tna/set_up.py leaf-spine.yaml leaf1 --grpc 127.0.0.1:50052 \
        --port 1=136,100G,RS --port 2=144,25G --port 3=152,100G,RS --port 4=160,100G,RS

A port is the number it has in the fabric, its device port, its speed, and its forward error correction (``NONE``,
``FC`` or ``RS``; NONE unless told otherwise). The device has to run ``p4/tna/dlcp.p4`` already. What the fabric says of
rates, depths, thresholds, shares, trust and routes is written as it is to other switches; depths become cells. What the
program's tables held before is removed. ``--dry-run`` reads from the device and writes to the terminal only.
"""

import argparse
import importlib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

if __package__ in (None, ""):  # run as a script: the folder of dlcp and controller is two above
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

from bfrt_writes import (
    CELL_BYTES,
    FECS,
    SPEEDS_BPS,
    Data,
    DevicePort,
    QueuePlace,
    SetUpError,
    Write,
    check_ports,
    entry_writes,
    port_writes,
    queue_writes,
    report_writes,
)

from dlcp.controller.entries import entries as entries_of
from dlcp.controller.fabric import Fabric, load
from dlcp.switch import QUEUES

PROGRAM: Final = "dlcp"
ALL_PIPES: Final = 0xFFFF
EMPTIED: Final = (
    "ipv4_route",
    "route_selector",
    "route_members",
    "ethernet_route",
    "port_trust",
    "classify",
    "job_share",
    "drop_threshold",
    "ecn_threshold",
    "device_port",
)
"""The program's tables, those first that refer to others."""

ADVICE: Final = """\
the Python module bfrt_grpc is not there: it comes with the SDE (https://github.com/p4lang/open-p4studio), in
install/lib/python3.*/site-packages/tofino; add that folder to PYTHONPATH"""


class Device:
    """A Tofino that runs the program, over the client of BF Runtime.

    Parameters
    ----------
    client
        The module ``bfrt_grpc.client``.
    info
        What its ``bfrt_info_get`` returns: the tables of program and driver.
    device_id
        The device's number in its driver.
    """

    def __init__(self, client: Any, info: Any, device_id: int = 0) -> None:
        self._client, self._info, self._device_id = client, info, device_id

    @classmethod
    def connect(cls, address: str, device_id: int = 0, client_id: int = 0) -> "Device":
        """Connect to the driver's gRPC server at ``HOST:PORT``.

        Raises
        ------
        SetUpError
            There is no ``bfrt_grpc``.
        """
        try:
            client = importlib.import_module("bfrt_grpc.client")
        except ModuleNotFoundError:
            raise SetUpError(ADVICE) from None
        interface = client.ClientInterface(address, client_id=client_id, device_id=device_id)
        interface.bind_pipeline_config(PROGRAM)
        return cls(client, interface.bfrt_info_get(PROGRAM), device_id)

    def buffer_cells(self) -> int:
        """Return how many cells the device can store.

        Raises
        ------
        SetUpError
            Its cells are not of the size that the thresholds are computed with.
        """
        table = self._info.table_get("tf1.tm.cfg")
        data = next(table.default_entry_get(self._target()))[0].to_dict()
        if data["cell_size_bytes"] != CELL_BYTES:
            raise SetUpError(f"the device has cells of {data['cell_size_bytes']} bytes, and not of {CELL_BYTES}")
        return int(data["total_cells"])

    def queue_place(self, device_port: int) -> QueuePlace:
        """Return where the eight queues of a port are.

        Raises
        ------
        SetUpError
            It has fewer.
        """
        table = self._info.table_get("tf1.tm.port.cfg")
        key = table.make_key([self._client.KeyTuple("dev_port", device_port)])
        data = next(table.entry_get(self._target(), [key], {"from_hw": False}))[0].to_dict()
        if data["port_queues_count"] < QUEUES:
            raise SetUpError(
                f"device port {device_port} has {data['port_queues_count']} queues: give it {QUEUES} "
                "through tf1.tm.port.group"
            )
        return QueuePlace(data["pg_id"], tuple(data["egress_qid_queues"][:QUEUES]))

    def clear(self, tables: Iterable[str] = EMPTIED) -> None:
        """Remove all entries of tables."""
        for name in tables:
            self._info.table_get(name).entry_del(self._target())

    def write(self, write: Write) -> None:
        """Write an entry, whether it is there already or not."""
        table = self._info.table_get(write.table)
        key = [self._client.KeyTuple(part.name, part.value, part.mask, part.prefix_len) for part in write.key]
        fields = [self._field(name, value) for name, value in write.data.items()]
        data = table.make_data(fields) if write.action is None else table.make_data(fields, write.action)
        target, keys = self._target(write.pipe), [table.make_key(key)]
        if not write.there_already:
            try:
                table.entry_add(target, keys, [data])
                return
            except self._client.BfruntimeReadWriteRpcException:
                pass  # it is there from an earlier run; not every table of the driver can add or modify in one
        table.entry_mod(target, keys, [data])

    def _target(self, pipe: int | None = None) -> Any:
        return self._client.Target(device_id=self._device_id, pipe_id=ALL_PIPES if pipe is None else pipe)

    def _field(self, name: str, value: Data) -> Any:
        """Return a field in the form in which the client wants it, which depends on the type."""
        if isinstance(value, bool):
            return self._client.DataTuple(name, bool_val=value)
        if isinstance(value, str):
            return self._client.DataTuple(name, str_val=value)
        if isinstance(value, list):
            if value and isinstance(value[0], bool):
                return self._client.DataTuple(name, bool_arr_val=value)
            return self._client.DataTuple(name, int_arr_val=value)
        return self._client.DataTuple(name, value)


def writes(fabric: Fabric, switch: str, ports: Sequence[DevicePort], device: Device) -> list[Write]:
    """Return all that has to be written to a switch, in order.

    Raises
    ------
    SetUpError
        Ports and fabric, or fabric and device, do not fit.
    """
    check_ports(fabric, switch, ports)
    places = {port.device_port: device.queue_place(port.device_port) for port in ports}
    return [
        *port_writes(ports),
        *queue_writes(fabric, switch, ports, places, device.buffer_cells()),
        *report_writes(ports),
        *entry_writes(entries_of(fabric, switch), fabric.mtu_bytes),
    ]


def device_port(text: str) -> DevicePort:
    """Return the port that ``NUMBER=DEVICE_PORT,SPEED[,FEC]`` describes."""
    number, _, rest = text.partition("=")
    device, _, options = rest.partition(",")
    speed, _, fec = options.partition(",")
    if not (number.isdecimal() and device.isdecimal()) or speed not in SPEEDS_BPS or (fec and fec not in FECS):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NUMBER=DEVICE_PORT,SPEED[,FEC] with a speed of {', '.join(SPEEDS_BPS)} "
            f"and {', '.join(FECS)}"
        )
    return DevicePort(int(number), int(device), speed, fec or "NONE")


def describe(write: Write) -> str:
    """Return a write as a person would put it."""
    key = ", ".join(
        f"{key.name}={key.value}"
        + (f"&&&{key.mask:#x}" if key.mask is not None else "")
        + (f"/{key.prefix_len}" if key.prefix_len is not None else "")
        for key in write.key
    )
    data = ", ".join(f"{name}={value}" for name, value in write.data.items())
    where = "" if write.pipe is None else f" pipe {write.pipe}"
    return f"{write.table}{where} [{key}] {write.action or ''}({data})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Set a switch up; return the exit status."""
    parser = argparse.ArgumentParser(description="Set a Tofino up for a fabric, over BF Runtime.")
    parser.add_argument("fabric", type=Path, help="description of the fabric, as for `dlcp fabric`")
    parser.add_argument("switch", help="which of its switches this is")
    parser.add_argument(
        "--port", type=device_port, action="append", default=[], metavar="NUMBER=DEVICE_PORT,SPEED[,FEC]"
    )
    parser.add_argument("--grpc", default="127.0.0.1:50052", metavar="HOST:PORT", help="where the driver answers")
    parser.add_argument("--device", type=int, default=0, help="the device's number in its driver")
    parser.add_argument("--dry-run", action="store_true", help="only show what would be written")
    options = parser.parse_args(arguments)
    try:
        fabric = load(options.fabric)
        fabric.switch(options.switch)
        device = Device.connect(options.grpc, options.device)
        planned = writes(fabric, options.switch, options.port, device)
        if options.dry_run:
            print(*map(describe, planned), sep="\n")
            return 0
        device.clear()
        for write in planned:
            device.write(write)
    except ValueError as error:  # whatever is wrong with fabric, ports or device is one of these
        print(error, file=sys.stderr)
        return 1
    print(f"{options.switch}: {len(planned)} entries written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
