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
- ``comm_size`` is what a rank puts into a collective, as in ASTRA-sim: its own shard for an all-gather.
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
from dlcp.sim.engines.arithmetic import PS_PER_US
from dlcp.sim.jobs.graph import Graph
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
_FIELD: Final = descriptor_pb2.FieldDescriptorProto
_VALUES: Final = {
    "double": 3,
    "float": 5,
    "int32": 7,
    "int64": 9,
    "uint32": 11,
    "uint64": 13,
    "sint32": 15,
    "sint64": 17,
    "fixed32": 19,
    "fixed64": 21,
    "sfixed32": 23,
    "sfixed64": 25,
    "bool": 27,
    "string": 29,
}
"""Field numbers of an attribute's value by its type; lists are not read."""


def _schema() -> tuple[Any, Any]:
    """Return the classes of GlobalMetadata and Node."""
    file = descriptor_pb2.FileDescriptorProto(name="chakra.proto", package="ChakraProtoMsg", syntax="proto3")

    def message(name: str, fields: Mapping[str, tuple[int, str, bool]]) -> Any:
        made = file.message_type.add(name=name)
        for field, (number, kind, repeated) in fields.items():
            label = _FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL
            own = kind[0].isupper()
            added = made.field.add(name=field, number=number, label=label)
            added.type = _FIELD.TYPE_MESSAGE if own else getattr(_FIELD, f"TYPE_{kind.upper()}")
            if own:
                added.type_name = f".ChakraProtoMsg.{kind}"
        return made

    attribute = message("AttributeProto", {"name": (1, "string", False)})
    attribute.oneof_decl.add(name="value")
    for kind, number in _VALUES.items():
        value = attribute.field.add(name=f"{kind}_val", number=number, label=_FIELD.LABEL_OPTIONAL, oneof_index=0)
        value.type = getattr(_FIELD, f"TYPE_{kind.upper()}")
    message("IOInfo", {"values": (1, "string", False)})
    message("GlobalMetadata", {"version": (1, "string", False), "attr": (2, "AttributeProto", True)})
    message(
        "Node",
        {
            "id": (1, "uint64", False),
            "name": (2, "string", False),
            "type": (3, "int32", False),
            "ctrl_deps": (4, "uint64", True),
            "data_deps": (5, "uint64", True),
            "duration_micros": (7, "uint64", False),
            "inputs": (8, "IOInfo", False),
            "attr": (10, "AttributeProto", True),
        },
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    metadata, node = (pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}") for name in ("GlobalMetadata", "Node"))
    return message_factory.GetMessageClass(metadata), message_factory.GetMessageClass(node)


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
    ranks = [reader.rank(rank, path) for rank, path in enumerate(files)]
    return Workload(str(files[0]), ranks, eager_bytes=ALWAYS_EAGER)


@dataclass(slots=True)
class _Reader:
    count: int
    groups: dict[str, tuple[int, ...]]
    flops: float | None

    def rank(self, rank: int, path: Path) -> list[RankOperation]:
        """Return the operations in a rank's file."""
        nodes = list(_nodes(path))
        positions: dict[int, int] = {}
        for position, node in enumerate(nodes):
            if node.id in positions:
                raise TraceFormatError(f"{path}: two nodes have the id {node.id}")
            positions[node.id] = position
        declared = dict(self.groups)
        for node in nodes:
            if "process_group:init" in node.name:
                declared |= self._declared(path, node)
        from_pytorch = any(each.name == "rf_id" for node in nodes for each in node.attr)
        operations = []
        for node in nodes:
            operation = self._operation(rank, path, node, declared)
            for before in dict.fromkeys((*node.data_deps, *(() if from_pytorch else node.ctrl_deps))):
                if before not in positions:
                    raise self._error(path, node, f"it waits for node {before}, which the file does not have")
                operation.after.append(positions[before])
            operations.append(operation)
        return operations

    def _error(self, path: Path, node: Any, reason: str) -> TraceFormatError:
        return TraceFormatError(f"{path}: node {node.id} ({node.name[:60]}): {reason}")

    def _declared(self, path: Path, node: Any) -> dict[str, tuple[int, ...]]:
        """Return the process groups that a node lists."""
        try:
            # PyTorch writes a list with one element, a text in quotes: JSON again.
            listed = json.loads(node.inputs.values.strip()[2:-2])
            everyone = range(self.count)
            return {str(each["pg_name"]): tuple(map(int, each["ranks"] or everyone)) for each in listed}
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
            raise self._error(path, node, "it does not list process groups as PyTorch does") from None

    def _operation(self, rank: int, path: Path, node: Any, groups: Mapping[str, tuple[int, ...]]) -> RankOperation:
        attributes = {each.name: _value(each) for each in node.attr}
        place, name = str(path), f"{node.id} ({node.name[:60]})"
        if not 0 < node.type < len(_NODE_TYPES):
            raise self._error(path, node, f"its type is {node.type}; 1 to {len(_NODE_TYPES) - 1} are possible")
        kind = _NODE_TYPES[node.type]
        on_cpu = bool(attributes.get("is_cpu_op", False))
        if kind == "COMM_COLL_NODE" and not on_cpu:
            operation = self._collective(rank, path, node, attributes, groups)
        elif kind in ("COMM_SEND_NODE", "COMM_RECV_NODE"):
            sends = kind == "COMM_SEND_NODE"
            peer = self._number(path, node, attributes, "comm_dst" if sends else "comm_src")
            size = self._size(path, node, attributes)
            columns = {each: attributes[_OWN + each] for each in COLUMNS if _OWN + each in attributes}
            operation = RankOperation(
                OperationKind.SEND if sends else OperationKind.RECEIVE,
                *(name, place),
                peer=peer,
                size_bytes=size,
                tag=self._number(path, node, attributes, "comm_tag", default=0),
                columns=columns or None,
            )
        else:
            duration_ps = 0 if kind == "METADATA_NODE" else self._duration_ps(path, node, attributes, kind)
            default = _CPU if on_cpu else _GPU
            processor = self._number(path, node, attributes, _OWN + "processor", default=default)
            operation = RankOperation(OperationKind.COMPUTE, name, place, duration_ps=duration_ps, processor=processor)
        operation.order = node.id
        return operation

    def _duration_ps(self, path: Path, node: Any, attributes: Mapping[str, Any], kind: str) -> int:
        if _OWN + "delay_ps" in attributes:
            return self._number(path, node, attributes, _OWN + "delay_ps")
        work = self._number(path, node, attributes, "num_ops", default=0)
        if kind != "COMP_NODE" or node.duration_micros or not work:
            return int(node.duration_micros) * PS_PER_US
        if self.flops is None:
            raise self._error(
                path, node, f"it has no duration, but {work} operations (num_ops); give the rate of a GPU as flops"
            )
        return round(work / self.flops * 1e12)

    def _collective(
        self, rank: int, path: Path, node: Any, attributes: Mapping[str, Any], groups: Mapping[str, tuple[int, ...]]
    ) -> RankOperation:
        number = self._number(path, node, attributes, "comm_type")
        if number >= len(_COLLECTIVES):
            raise self._error(path, node, f"comm_type is {number}; 0 to {len(_COLLECTIVES) - 1} are possible")
        collective = _COLLECTIVES[number]
        group_name = str(attributes.get("pg_name") or attributes.get("comm_group") or "")
        if group_name in groups:
            group = groups[group_name]
        elif group_name in ("", "0"):
            group = tuple(range(self.count))
        else:
            known = f"; known are {', '.join(sorted(groups))}" if groups else ""
            raise self._error(
                path, node, f"the trace does not say which ranks are in its process group {group_name!r}{known}"
            )
        if not group:
            raise self._error(path, node, f"its process group {group_name!r} has no ranks")
        root = self._number(path, node, attributes, "comm_root", default=group[0]) if collective in _ROOTED else 0
        size = 0 if collective == "barrier" else self._size(path, node, attributes)
        if root not in group and collective in _ROOTED:
            raise self._error(path, node, f"its root, rank {root}, is not in its group")
        return RankOperation(
            OperationKind.COLLECTIVE,
            *(f"{node.id} ({node.name[:60]})", str(path)),
            collective=collective,
            size_bytes=size,
            group=group,
            peer=root,
        )

    def _size(self, path: Path, node: Any, attributes: Mapping[str, Any]) -> int:
        """Return the bytes that are sent."""
        size = self._number(path, node, attributes, "comm_size")
        if not size:
            raise self._error(path, node, "comm_size is 0, so the trace does not say how much is sent")
        return size

    def _number(
        self, path: Path, node: Any, attributes: Mapping[str, Any], name: str, *, default: int | None = None
    ) -> int:
        """Return an attribute, a whole number of at least 0."""
        value = attributes.get(name, default)
        if value is None:
            raise self._error(path, node, f"the attribute {name} is missing")
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,20}", value):
            return int(value)
        if isinstance(value, int | float) and 0 <= value < 1 << 64 and value == int(value):
            return int(value)
        raise self._error(path, node, f"{name} is {str(value)[:20]!r}; it must be a number of at least 0")


def _value(attribute: Any) -> Any:
    kind = attribute.WhichOneof("value")
    return None if kind is None else getattr(attribute, kind)


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
            numbers = [_number_of(operation) for operation in operations]
            for operation, number in zip(operations, numbers, strict=True):
                _write_message(out, _node_of(rank, operation, number, numbers))
        files.append(file)
    return files


def _number_of(operation: RankOperation) -> int:
    """Return a node's id. It follows the graph's node, so that a reader can begin nodes in the graph's order."""
    return 4 * operation.order + "ndsr".index(operation.name[0])


def _node_of(rank: int, operation: RankOperation, number: int, numbers: list[int]) -> Any:
    kinds = {
        OperationKind.COMPUTE: "COMP_NODE",
        OperationKind.SEND: "COMM_SEND_NODE",
        OperationKind.RECEIVE: "COMM_RECV_NODE",
    }
    kind = kinds[operation.kind]
    node = _Node(id=number, name=operation.name, type=_NODE_TYPES.index(kind))
    node.data_deps.extend(numbers[before] for before in operation.after)
    attributes: dict[str, Any] = {"is_cpu_op": False}
    if operation.kind is OperationKind.COMPUTE:
        node.duration_micros = round(operation.duration_ps / PS_PER_US)
        attributes |= {_OWN + "delay_ps": operation.duration_ps}
        if operation.processor not in (_GPU, NO_PROCESSOR):
            attributes |= {_OWN + "processor": operation.processor}
    else:
        source, target = (rank, operation.peer)[:: 1 if operation.kind is OperationKind.SEND else -1]
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
