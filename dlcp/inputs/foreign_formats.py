# SPDX-License-Identifier: Apache-2.0
"""Recognize files of other tools, to say what a file is instead of what is wrong with it.

A reader that refuses a file asks `foreign_format` first. Formats are recognized by marks that none of DLCP's own files
has, so a mistake in one of those is still reported as such.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

_HEAD: Final = 4096
"""Bytes that are searched for marks, which all come first."""
_TO_NETWORK: Final = "list its hosts, switches and links in a file of DLCP (docs/simulate.md, docs/fabric.md)"
_TO_FABRIC: Final = "`dlcp fabric`, `dlcp switch` and `dlcp testbed` read it as a fabric (docs/fabric.md)"
_TO_GOAL: Final = "write its messages as GOAL (docs/traces.md), or as `patterns` of an experiment"
_TO_TRACE: Final = "DLCP replays GOAL, Chakra (NAME.RANK.et) and profiles of PyTorch (docs/traces.md)"
_CHAKRA_JSON: Final = ("Chakra's JSON (chakra_jsonizer)", "give the files NAME.RANK.et from which it was made")
_TO_ET: Final = "convert it to NAME.RANK.et with Chakra's chakra_converter"


def _has(*names: str) -> Callable[[dict[str, Any]], bool]:
    """Return whether a document has all of some keys."""
    return lambda content: all(name in content for name in names)


def _nested(outer: str, *names: str) -> Callable[[dict[str, Any]], bool]:
    """Return whether a key of a document has one of some keys."""
    return lambda content: isinstance(content.get(outer), dict) and any(name in content[outer] for name in names)


def is_tutorial(content: Mapping[str, Any]) -> bool:
    """Return whether a document maps hosts to addresses and lists links as pairs."""
    links = content.get("links")
    return isinstance(content.get("hosts"), dict) and isinstance(links, list) and "switches" in content


def _has_chakra_nodes(content: dict[str, Any]) -> bool:
    nodes = content.get("nodes") or content.get("workload_graph")
    first = nodes[0] if isinstance(nodes, list) and nodes else None
    if not isinstance(first, dict):
        return False
    return bool({"dataDeps", "data_deps", "ctrlDeps", "ctrl_deps", "durationMicros"} & first.keys()) or bool(
        re.match(r"(COMM|COMP|MEM)_\w*NODE$", str(first.get("type") or first.get("NodeType")))
    )


_DOCUMENTS: Final[tuple[tuple[Callable[[dict[str, Any]], bool], str, str], ...]] = (
    (_has("p4_src"), "p4-utils' p4app.json", _TO_FABRIC),
    (_nested("topology", "assignment_strategy", "auto_arp_tables", "hosts"), "p4-utils' p4app.json", _TO_FABRIC),
    (_has("program", "targets"), "a manifest of p4app", _TO_NETWORK),
    (is_tutorial, "the topology.json of p4lang's tutorials", _TO_FABRIC),
    (_nested("topology", "nodes", "kinds"), "containerlab's topology", _TO_NETWORK),
    (_has("application", "controllers", "hosts"), "a network of MiniEdit (Mininet)", _TO_NETWORK),
    (
        lambda content: "npus_count" in content or _has("topology", "bandwidth", "latency")(content),
        "ASTRA-sim's network configuration",
        "name a `topology` in the experiment (docs/simulate.md)",
    ),
    (
        lambda content: any(name.endswith("-implementation") or name == "scheduling-policy" for name in content),
        "ASTRA-sim's system configuration",
        "set `collective` of the job or trace in the experiment instead",
    ),
    (_has("memory-type"), "ASTRA-sim's memory configuration", "the simulator has no memory; leave it out"),
    (_has("logical-dims"), "ASTRA-sim's logical topology", "name a `topology` in the experiment (docs/simulate.md)"),
    (_has("network_backend"), "a configuration of ASTRA-sim's service", "give its Chakra traces and InfraGraph file"),
    (_has("schema", "nodes"), "an execution trace of PyTorch (ExecutionTraceObserver)", _TO_ET),
    (_has_chakra_nodes, *_CHAKRA_JSON),
    (
        lambda content: ("instances" in content and "devices" in content) or _has("infrastructure")(content),
        "an InfraGraph infrastructure",
        "`dlcp sim` reads it as a topology of kind file (docs/simulate.md)",
    ),
    (_has("directed", "multigraph", "nodes"), "a graph of NetworkX", _TO_NETWORK),
    (_has("apiVersion", "kind"), "a manifest of Kubernetes", "give a file of DLCP"),
    (_has("services"), "a compose file", "give a file of DLCP"),
)
"""For each format: a test that recognises a document, the format's name, and the advice to give."""
_TEXTS: Final = (
    (r"(?i)nodes\s+\d+\s+connections\s+\d+", "htsim's connection matrix (.cm)", _TO_GOAL),
    (r"(?i)nodes\s+\d+\s+(?:\w+\s+\S+\s+)*tiers\s+\d+", "htsim's topology (.topo)", _TO_NETWORK),
    (r"(?:DATA|MODEL|MICRO|HYBRID|DISTRIBUTED)\w*\b[^\n]*\n\s*\d+\s*\n", "a workload of ASTRA-sim or SimAI", _TO_ET),
    (r"(?:<\?xml[^>]*>\s*)?(?:<!DOCTYPE[^>]*>\s*)?<platform\b", "SimGrid's platform", _TO_NETWORK),
    (r"(?:<\?xml[^>]*>\s*)?<(?:system|graphs)\b", "NCCL's topology", _TO_NETWORK),
    (r"(?:<\?xml[^>]*>\s*)?(?:<!DOCTYPE[^>]*>\s*)?<(?:topology|graphml)\b", "a topology in XML", _TO_NETWORK),
    (r"(?:strict\s+)?(?:di)?graph\s*\w*\s*\{", "a graph of Graphviz (DOT)", _TO_NETWORK),
    (r"(?:Creator[^\n]*\n)?graph\s*\[", "a graph in GML", _TO_NETWORK),
    (
        r"\d+ \d+ \d+\b[^\n]*\n(?:\d+\s)*\d+ \d+ \d\S*[GM][bB]ps\b",
        "HPCC's or SimAI's topology for ns-3",
        _TO_NETWORK,
    ),
    (r"(?s)[{\[].*?\"(?:dataDeps|ctrlDeps|data_deps|ctrl_deps|COMM_\w+_NODE|COMP_NODE)\"", *_CHAKRA_JSON),
    (r"num_ranks\s+\d+", "a job in GOAL", "replay it with `dlcp sim replay`, or name it under `traces`"),
    (r"%?\s*\d+(?:\.\d+)?[ \t]+\d+(?:\.\d+)?\s*\n", "a table of two columns", "give its rows under `traffic: sizes`"),
)
"""The same for text, as patterns at its beginning."""
_MAGIC: Final = (
    (b"SQLite format 3", "a database of SQLite, such as a report of Nsight Systems", _TO_TRACE),
    (b"PK\x03\x04", "a zip archive", "unpack it"),
    (b"\x1f\x8b", "compressed with gzip", "unpack it"),
    (b"\x93NUMPY", "an array of NumPy", "give text"),
    (b"\xd4\xc3\xb2\xa1", "a capture of packets (pcap)", _TO_TRACE),
    (b"\x0a\x0d\x0d\x0a", "a capture of packets (pcapng)", _TO_TRACE),
    ((4223).to_bytes(8, "little"), "a job in binary GOAL", "replay it with `dlcp sim replay`"),
    (
        # Two messages with their lengths: metadata (empty, or a version or an attribute first) and a node.
        rb"[\x80-\xff]{0,2}(?:\0[\x80-\xff]{0,3}[\x02-\x7f][\x08\x12]"
        rb"|[\x02-\x7f](?:\n[\x01-\x08\x0b\x0c\x0e-\x1f]\d|\x12[^\n]{1,2}\n))",
        "a Chakra trace",
        "name it NAME.RANK.et and replay it with `dlcp sim replay`",
    ),
)
"""The same for binary files, as patterns of bytes."""


def foreign_format(raw: bytes, content: Any = None) -> str:
    """Return what a file of another tool is, and what to do instead, as a sentence; empty if it is not recognized.

    Parameters
    ----------
    raw
        The beginning of the file, or all of it.
    content
        Its content, if it is YAML or JSON; None if it cannot be read as either.
    """
    for name, advice in _recognized(raw, content):
        return f"this is {name}, which is not supported here: {advice}"
    return ""


def _recognized(raw: bytes, content: Any) -> Iterator[tuple[str, str]]:
    """Yield the names of formats that a file may have, and what to do; the first is the best."""
    yield from ((name, advice) for pattern, name, advice in _MAGIC if re.match(pattern, raw))
    if not isinstance(content, dict):
        # Tools skip comments and empty lines before the first statement.
        text = re.sub(r"\A(?:\s|#[^\n]*\n|//[^\n]*\n)+", "", raw[:_HEAD].decode(errors="replace"))
        yield from ((name, advice) for pattern, name, advice in _TEXTS if re.match(pattern, text))
        if content is not None:
            return
        # Perhaps damaged YAML or JSON. In YAML, only the keys of the outermost level count.
        keys = r"\"([\w-]+)\"\s*:" if text.startswith("{") else r"(?m)^[\"']?([\w-]+)[\"']?[ \t]*:(?=\s|\Z)"
        content = dict.fromkeys(re.findall(keys, text))
    yield from ((name, advice) for matches, name, advice in _DOCUMENTS if matches(content))
