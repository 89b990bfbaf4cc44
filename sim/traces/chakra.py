# SPDX-License-Identifier: Apache-2.0
"""Read and write MLCommons Chakra execution traces: one file ``NAME.RANK.et`` per rank, of protobuf messages.

A file has a ``GlobalMetadata`` and then one ``Node`` per operation, each with its length before it. The messages and
attributes are those of Chakra's ``schema/protobuf/et_def.proto`` and of the generators in its repository; only the
fields that are read or written here are declared.

- A node waits for its ``data_deps`` and ``ctrl_deps``. In files converted from PyTorch (their nodes have ``rf_id``),
  ``ctrl_deps`` name the caller, and do not count.
- A send ends when it begins, whatever its size: ASTRA-sim does not wait for the receiver either.
- Computations on the CPU (``is_cpu_op``) run one at a time, and so do those on the GPU. A memory access is a
  computation of its duration.
- ``comm_size`` is the size of a rank's input to a collective, as in ASTRA-sim: its own shard for an all-gather.
- A collective's ranks are those of its process group (``pg_name``), as a node ``process_group:init`` or the reader's
  caller lists them. Without a name, or with the name 0 if nothing lists it, all ranks take part.
- A node for a collective on the CPU (``is_cpu_op``) only starts the one on the GPU, and is a computation.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

import dlcp
from dlcp.sim.arithmetic import PS_PER_US
from dlcp.sim.graphs.graph import Graph
from dlcp.sim.traces.graph_operations import COLUMNS, operations_of
from dlcp.sim.traces.operations import (
    ALWAYS_EAGER,
    NO_PROCESSOR,
    OperationKind,
    RankOperation,
    TracedCollective,
    TraceFormatError,
    Workload,
    trace_content,
)

SUFFIX_PATTERN: Final = re.compile(r"^(?P<prefix>.*)\.(?P<rank>\d+)\.et$")
_OWN: Final = "dlcp_"
"""Prefix of the attributes that other tools ignore: a delay in picoseconds, and a message's columns."""
_LONGEST_MESSAGE: Final = 1 << 31
"""Protobuf's own limit in bytes."""
_GPU, _CPU = 0, 1
_NODE_TYPES: Final = (
    *("INVALID_NODE", "METADATA_NODE", "MEM_LOAD_NODE", "MEM_STORE_NODE", "COMP_NODE"),
    *("COMM_SEND_NODE", "COMM_RECV_NODE", "COMM_COLL_NODE"),
)
_COLLECTIVES: Final[tuple[TracedCollective, ...]] = (
    *("all_reduce", "reduce", "all_gather", "gather", "scatter", "broadcast", "all_to_all", "reduce_scatter"),
    *("reduce_scatter", "barrier"),
)
"""By the number of ``CollectiveCommType``; number 8 is REDUCE_SCATTER_BLOCK."""
_ROOTED: Final = ("reduce", "gather", "scatter", "broadcast")
_MESSAGES: Final = {
    "AttributeProto": "name string 1",
    "IOInfo": "values string 1",
    "GlobalMetadata": "version string 1, attr AttributeProto* 2",
    "Node": (
        "id uint64 1, name string 2, type int32 3, ctrl_deps uint64* 4, data_deps uint64* 5, duration_micros uint64 7, "
        "inputs IOInfo 8, attr AttributeProto* 10"
    ),
}
"""Fields of a message: name, type and number; ``*`` repeats."""
_VALUES: Final = (
    *("double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64"),
    *("fixed32", "fixed64", "sfixed32", "sfixed64", "bool", "string"),
)
"""Types of an attribute's value; their fields have the numbers 3, 5, 7 and so on. Lists, in between, are not read."""


def _schema() -> Iterator[Any]:
    """Yield the classes of GlobalMetadata and Node."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="chakra.proto", package="ChakraProtoMsg", syntax="proto3")
    for name, fields in _MESSAGES.items():
        made = file.message_type.add(name=name)
        for field, kind, number in map(str.split, fields.split(", ")):
            own, repeated = kind.rstrip("*"), kind.endswith("*")
            label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
            added = made.field.add(name=field, number=int(number), label=label)
            if own in _MESSAGES:
                added.type, added.type_name = kinds.TYPE_MESSAGE, f".ChakraProtoMsg.{own}"
            else:
                added.type = getattr(kinds, f"TYPE_{own.upper()}")
    attribute = file.message_type[0]
    attribute.oneof_decl.add(name="value")
    for at, kind in enumerate(_VALUES):
        value = attribute.field.add(name=f"{kind}_val", number=3 + 2 * at, label=kinds.LABEL_OPTIONAL, oneof_index=0)
        value.type = getattr(kinds, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    for name in ("GlobalMetadata", "Node"):
        yield message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}"))


_Metadata, _Node = _schema()


# ------------------------------------------------------------------------------------------------------------- reading


def rank_files(path: Path) -> list[Path]:
    """Return the files of all ranks.

    Parameters
    ----------
    path
        The file of a rank, or its name without ``.RANK.et``.

    Raises
    ------
    TraceFormatError
        A rank has no file.
    """
    found = SUFFIX_PATTERN.match(path.name)
    prefix = found["prefix"] if found else path.name
    ranks = {
        int(match["rank"]): each
        for each in path.parent.glob("*.et")
        if (match := SUFFIX_PATTERN.match(each.name)) and match["prefix"] == prefix
    }
    if not ranks:
        if path.is_file():
            return [path]
        raise TraceFormatError(f"{path}: there is neither this file nor {prefix}.0.et")
    missing = [rank for rank in range(max(ranks) + 1) if rank not in ranks]
    if missing:
        raise TraceFormatError(
            f"{path.parent / prefix}.{missing[0]}.et: rank {missing[0]} has no file; the trace needs one for each rank "
            f"from 0 to {max(ranks)}"
        )
    return [ranks[rank] for rank in sorted(ranks)]


def read_chakra(
    files: list[Path], *, groups: Mapping[str, tuple[int, ...]] | None = None, flops: float | None = None
) -> Workload:
    """Return the job in the files of its ranks.

    Parameters
    ----------
    groups
        The ranks of process groups by name, if the trace does not list them.
    flops
        Operations per second, for computations that have ``num_ops`` but no duration.

    Raises
    ------
    TraceFormatError
        A file is wrong or incomplete; the message names the file, the node and the reason.
    """
    reader = _Reader(len(files), dict(groups or {}), flops)
    return Workload(str(files[0]), [reader.rank(path) for path in files], eager_bytes=ALWAYS_EAGER)


class _ReadNode:
    """A node of a file, and its attributes."""

    def __init__(self, path: Path, node: Any) -> None:
        self.path, self.node = path, node
        self.name = f"{node.id} ({node.name[:60]})"
        self.attributes: dict[str, Any] = {
            each.name: getattr(each, each.WhichOneof("value")) if each.WhichOneof("value") else None
            for each in node.attr
        }

    def error(self, reason: str) -> TraceFormatError:
        return TraceFormatError(f"{self.path}: node {self.name}: {reason}")

    def operation(self, kind: OperationKind, **fields: Any) -> RankOperation:
        return RankOperation(kind, self.name, str(self.path), order=self.node.id, **fields)

    def number(self, name: str, default: int | None = None) -> int:
        """Return an attribute, a whole number of at least 0."""
        value = self.attributes.get(name, default)
        if value is None:
            raise self.error(f"the attribute {name} is missing")
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,20}", value):
            return int(value)
        if isinstance(value, int | float) and 0 <= value < 1 << 64 and value == int(value):
            return int(value)
        raise self.error(f"{name} is {str(value)[:20]!r}; it must be a number of at least 0")

    def size(self) -> int:
        """Return the bytes that are sent."""
        if size := self.number("comm_size"):
            return size
        raise self.error("comm_size is 0, so the trace does not say how much is sent")


@dataclass(slots=True)
class _Reader:
    count: int
    groups: dict[str, tuple[int, ...]]
    flops: float | None

    def rank(self, path: Path) -> list[RankOperation]:
        """Return the operations in a rank's file."""
        nodes = [_ReadNode(path, each) for each in _nodes(path)]
        positions: dict[int, int] = {}
        groups = dict(self.groups)
        for position, each in enumerate(nodes):
            if each.node.id in positions:
                raise TraceFormatError(f"{path}: two nodes have the id {each.node.id}")
            positions[each.node.id] = position
            if "process_group:init" in each.node.name:
                groups |= self._declared(each)
        from_pytorch = any("rf_id" in each.attributes for each in nodes)
        operations = []
        for each in nodes:
            operation = self._operation(each, groups)
            for before in dict.fromkeys((*each.node.data_deps, *(() if from_pytorch else each.node.ctrl_deps))):
                if before not in positions:
                    raise each.error(f"it waits for node {before}, which the file does not have")
                operation.after.append(positions[before])
            operations.append(operation)
        return operations

    def _declared(self, each: _ReadNode) -> dict[str, tuple[int, ...]]:
        """Return the process groups that a node lists."""
        try:
            # PyTorch writes a list with one element, a text in quotes: JSON again.
            listed = json.loads(each.node.inputs.values.strip()[2:-2])
            return {str(group["pg_name"]): tuple(map(int, group["ranks"] or range(self.count))) for group in listed}
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
            raise each.error("it does not list process groups as PyTorch does") from None

    def _operation(self, each: _ReadNode, groups: Mapping[str, tuple[int, ...]]) -> RankOperation:
        number, on_cpu = each.node.type, bool(each.attributes.get("is_cpu_op", False))
        if not 0 < number < len(_NODE_TYPES):
            raise each.error(f"its type is {number}; 1 to {len(_NODE_TYPES) - 1} are possible")
        kind = _NODE_TYPES[number]
        if kind == "COMM_COLL_NODE" and not on_cpu:
            return self._collective(each, groups)
        if kind in ("COMM_SEND_NODE", "COMM_RECV_NODE"):
            sends = kind == "COMM_SEND_NODE"
            return each.operation(
                OperationKind.SEND if sends else OperationKind.RECEIVE,
                peer=each.number("comm_dst" if sends else "comm_src"),
                size_bytes=each.size(),
                tag=each.number("comm_tag", 0),
                columns={name: each.attributes[_OWN + name] for name in COLUMNS if _OWN + name in each.attributes},
            )
        processor = each.number(_OWN + "processor", _CPU if on_cpu else _GPU)
        return each.operation(OperationKind.COMPUTE, duration_ps=self._duration_ps(each, kind), processor=processor)

    def _duration_ps(self, each: _ReadNode, kind: str) -> int:
        if kind == "METADATA_NODE":
            return 0
        if _OWN + "delay_ps" in each.attributes:
            return each.number(_OWN + "delay_ps")
        work = each.number("num_ops", 0)
        if kind != "COMP_NODE" or each.node.duration_micros or not work:
            return int(each.node.duration_micros) * PS_PER_US
        if self.flops is None:
            raise each.error(f"it has no duration, but {work} operations (num_ops); give the rate of a GPU as flops")
        return round(work / self.flops * 1e12)

    def _collective(self, each: _ReadNode, groups: Mapping[str, tuple[int, ...]]) -> RankOperation:
        number = each.number("comm_type")
        if number >= len(_COLLECTIVES):
            raise each.error(f"comm_type is {number}; 0 to {len(_COLLECTIVES) - 1} are possible")
        collective = _COLLECTIVES[number]
        name = str(each.attributes.get("pg_name") or each.attributes.get("comm_group") or "")
        group = groups.get(name)
        if group is None and name in ("", "0"):
            group = tuple(range(self.count))
        elif group is None:
            known = f"; known are {', '.join(sorted(groups))}" if groups else ""
            raise each.error(f"the trace does not say which ranks are in its process group {name!r}{known}")
        if not group:
            raise each.error(f"its process group {name!r} has no ranks")
        root = each.number("comm_root", group[0]) if collective in _ROOTED else 0
        if root not in group and collective in _ROOTED:
            raise each.error(f"its root, rank {root}, is not in its group")
        size = 0 if collective == "barrier" else each.size()
        return each.operation(OperationKind.COLLECTIVE, collective=collective, size_bytes=size, group=group, peer=root)


def _nodes(path: Path) -> Iterator[Any]:
    """Yield the nodes of a file."""
    content = trace_content(path)
    offset, number = 0, 0
    while offset < len(content):
        size, begin = _length(path, content, offset, number)
        if begin + size > len(content):
            raise TraceFormatError(
                f"{path}: byte {offset}: message {number} has {size} bytes, but only {len(content) - begin} follow; "
                "the file is incomplete"
            )
        kind = _Node if number else _Metadata
        try:
            message = kind.FromString(content[begin : begin + size])
        except DecodeError:
            raise TraceFormatError(
                f"{path}: byte {offset}: message {number} is not a Chakra {kind.DESCRIPTOR.name}"
            ) from None
        if number:
            yield message
        offset, number = begin + size, number + 1
    if not number:
        raise TraceFormatError(f"{path}: the file is empty")


def _length(path: Path, content: bytes, offset: int, number: int) -> tuple[int, int]:
    """Return the length of a message, a varint, and where the message begins."""
    size, shift = 0, 0
    for place in range(offset, min(offset + 5, len(content))):
        size |= (content[place] & 0x7F) << shift
        shift += 7
        if not content[place] & 0x80:
            if size < _LONGEST_MESSAGE:
                return size, place + 1
            break
    raise TraceFormatError(f"{path}: byte {offset}: this is not the length of message {number}")


# ------------------------------------------------------------------------------------------------------------- writing


def write_chakra(graph: Graph, path: Path) -> list[Path]:
    """Write a graph as Chakra traces, one file per rank; return the files.

    Rank r is host r. Durations are rounded to Chakra's microseconds for other tools. Further attributes keep exact
    times, and the columns of messages (queue, order, loss bound, ...), so that reading the files gives the same job.

    Parameters
    ----------
    path
        Name of the files without ``.RANK.et``.

    Raises
    ------
    ValueError
        A node waits for something on another host without a message.
    OSError
        A file cannot be written.
    """
    ranks = operations_of(graph)
    files = []
    for rank, operations in enumerate(ranks):
        file = path.with_name(f"{path.name}.{rank}.et")
        with file.open("wb") as out:
            _write_message(out, _Metadata(version="0.0.4", attr=[_attribute("generator", f"dlcp {dlcp.__version__}")]))
            # A node's id follows the graph's node, so that a reader can begin nodes in the graph's order.
            numbers = [4 * operation.order + "ndsr".index(operation.name[0]) for operation in operations]
            for operation, number in zip(operations, numbers, strict=True):
                _write_message(out, _node_of(rank, operation, number, numbers))
        files.append(file)
    return files


def _node_of(rank: int, operation: RankOperation, number: int, numbers: list[int]) -> Any:
    computes, sends = operation.kind is OperationKind.COMPUTE, operation.kind is OperationKind.SEND
    kind = "COMP_NODE" if computes else "COMM_SEND_NODE" if sends else "COMM_RECV_NODE"
    node = _Node(id=number, name=operation.name, type=_NODE_TYPES.index(kind))
    node.data_deps.extend(numbers[before] for before in operation.after)
    attributes: dict[str, Any] = {"is_cpu_op": False}
    if computes:
        node.duration_micros = round(operation.duration_ps / PS_PER_US)
        attributes |= {_OWN + "delay_ps": operation.duration_ps}
        if operation.processor not in (_GPU, NO_PROCESSOR):
            attributes |= {_OWN + "processor": operation.processor}
    else:
        source, target = (rank, operation.peer)[:: 1 if sends else -1]
        attributes |= {"comm_src": source, "comm_dst": target}
        attributes |= {"comm_size": operation.size_bytes, "comm_tag": operation.tag}
        attributes |= {_OWN + name: value for name, value in (operation.columns or {}).items()}
    node.attr.extend(_attribute(name, value) for name, value in attributes.items())
    return node


def _attribute(name: str, value: Any) -> Any:
    kinds = {bool: "bool", int: "int64", float: "double", str: "string"}
    return _Metadata().attr.add(name=name, **{f"{kinds[type(value)]}_val": value})


def _write_message(out: Any, message: Any) -> None:
    content = message.SerializeToString(deterministic=True)
    size, head = len(content), bytearray()
    while size > 0x7F:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    out.write(bytes([*head, size]) + content)
