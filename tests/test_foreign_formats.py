# SPDX-License-Identifier: Apache-2.0
"""Files of other tools are named, with what to do; DLCP's own files never are."""

import json
from pathlib import Path

import pytest

from dlcp.cli import main
from dlcp.inputs.document import Document, DocumentError
from dlcp.inputs.foreign_formats import foreign_format
from dlcp.sim.network.topology import NetworkFile

ROOT = Path(__file__).parents[1]
LINKS = [["h1", "s1-p1"], ["h2", "s1-p2"]]
FILES = {
    "p4app.json": ({"p4_src": "a.p4", "topology": {"links": LINKS, "hosts": {"h1": {}}}}, "p4-utils' p4app.json"),
    "p4app2.json": ({"topology": {"assignment_strategy": "l2", "links": LINKS}}, "p4-utils' p4app.json"),
    "topology.json": (
        {"hosts": {"h1": {"ip": "10.0.1.1/24"}}, "switches": {"s1": {"runtime_json": "r.json"}}, "links": LINKS},
        "the topology.json of p4lang's tutorials",
    ),
    "lab.clab.yml": ("name: a\ntopology: {nodes: {a: {kind: linux}}, links: []}\n", "containerlab's topology"),
    "network.yml": ("topology: [ Ring ]\nnpus_count: [ 8 ]\nbandwidth: [ 50 ]\n", "ASTRA-sim's network configuration"),
    "system.json": ({"scheduling-policy": "LIFO", "endpoint-delay": 10}, "ASTRA-sim's system configuration"),
    "memory.json": ({"memory-type": "NO_MEMORY_EXPANSION"}, "ASTRA-sim's memory configuration"),
    "logical.json": ({"logical-dims": ["8"]}, "ASTRA-sim's logical topology"),
    "chakra.json": ({"nodes": [{"id": "1", "type": "COMM_COLL_NODE", "dataDeps": []}]}, "Chakra's JSON"),
    "lines.json": ('{"version": "0.0.4"}\n{"id": "1", "type": "COMP_NODE", "dataDeps": ["3"]}\n', "Chakra's JSON"),
    "et.json": ({"schema": "1.1.1-chakra.0.0.4", "nodes": [{"id": 1}]}, "an execution trace of PyTorch"),
    "all.cm": ("Nodes 4\nConnections 1\n0->1 id 1 start 0 size 1000\n", "htsim's connection matrix"),
    "fat.topo": ("# a tree\nNodes 16\nTiers 3\nPodsize 4\n", "htsim's topology"),
    "gpt.txt": (
        "HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: 8 ep: 1\n2\nembedding -1 1 NONE 0 1 NONE 0\n",
        "a workload of ASTRA-sim or SimAI",
    ),
    "mlp.txt": ("DATA\n3\nlayer1 -1 1 NONE 0\n", "a workload of ASTRA-sim or SimAI"),
    "platform.xml": ("<?xml version='1.0'?>\n<!DOCTYPE platform>\n<platform version='4.1'/>", "SimGrid's platform"),
    "nccl.xml": ("<system version='1'>\n</system>", "NCCL's topology"),
    "net.dot": ("digraph net {\n a -> b;\n}\n", "a graph of Graphviz"),
    "hpcc.txt": ("5 1 4\n4\n0 4 100Gbps 1000ns 0\n", "HPCC's or SimAI's topology for ns-3"),
    "simai.topo": ("9 8 1 0 8 H100\n8\n0 8 4800GBps 0.000025ms 0\n", "HPCC's or SimAI's topology for ns-3"),
    "job.goal": ("num_ranks 2\nrank 0 {\n}\n", "a job in GOAL"),
    "run.sqlite": (b"SQLite format 3\0\xff", "a database of SQLite"),
    "job.bin": ((4223).to_bytes(8, "little") + b"\xff", "a job in binary GOAL"),
    "lower.cm": ("nodes 4\nconnections 1\n0->1 id 1 start 0 size 1000\n", "htsim's connection matrix"),
    "metadata.et": (b"\x21\n\x050.0.4\x12\x18\n\x09generator\xea\x01\ndlcp 0.1.0", "a Chakra trace"),
    "long.et": (b"\xa1\x02\n\x121.1.1-chakra.0.0.4\x12\x18\n\x09generator\xea\x01", "a Chakra trace"),
    "attribute.et": (b"\x1a\x12\x18\n\x09generator\xea\x01\ndlcp 0.1.0", "a Chakra trace"),
    "bare.et": (b"\0\x29\x12\x02n0\x18\x04R\x0e\n\x09is_cpu_op\xd8\x01\0", "a Chakra trace"),
    "broken.yml": ("topology: [ Ring\nnpus_count: [ 8 ]\nbandwidth: [ 50 ]\n", "ASTRA-sim's network configuration"),
    "cut.yml": ("topology: [ Ring ]\nbandwidth: [ 50 ]\nlatency: [ 5", "ASTRA-sim's network configuration"),
    "bytes.yml": (b"topology: [ Ring ]\nnpus_count: [ 8 ]\n\xff\n", "ASTRA-sim's network configuration"),
    "cut.json": ('{"scheduling-policy": "LIFO", "endpoint-delay": 1', "ASTRA-sim's system configuration"),
    "cut.clab.yml": ("name: a\nservices: {a: {image\n", "a compose file"),
    "graph.yaml": ("devices: []\ninstances: [{name: a}]\n", "an InfraGraph infrastructure"),
}


def write(folder: Path, name: str) -> tuple[str, str]:
    content, words = FILES[name]
    raw = (
        content
        if isinstance(content, bytes)
        else (content if isinstance(content, str) else json.dumps(content)).encode()
    )
    (folder / name).write_bytes(raw)
    return str(folder / name), words


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("command", [["sim", "run"], ["fabric", "plan"]])
def test_a_file_of_another_tool_is_named(tmp_path, capsys, command, name) -> None:
    if (command[0], name) == ("fabric", "topology.json"):
        pytest.skip("this is read: tests/controller/test_topology_files.py")
    file, words = write(tmp_path, name)
    assert main([*command, file]) != 0
    assert f"this is {words}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", [name for name in FILES if name not in ("job.goal", "job.bin") and not name.endswith(".et")]
)
def test_a_trace_of_another_tool_is_named(tmp_path, capsys, name) -> None:
    file, words = write(tmp_path, name)
    assert main(["sim", "replay", file]) == 2
    assert f"{file}: this is {words}" in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name in FILES if name != "graph.yaml"])
def test_a_topology_of_another_tool_is_named(tmp_path, capsys, name) -> None:
    file, words = write(tmp_path, name)
    (job := tmp_path / "two.goal").write_text("num_ranks 2\nrank 0 {\nsend 9b to 1\n}\nrank 1 {\nrecv 9b from 0\n}\n")
    assert main(["sim", "replay", str(job), "--topology", file]) == 2
    assert f"{file}: this is {words}" in capsys.readouterr().err


def test_dlcps_own_files_are_of_no_other_tool() -> None:
    files = [*(ROOT / "sim/experiments").glob("*.yaml"), *(ROOT / "controller/examples").glob("*.yaml")]
    assert len(files) > 20
    for file in files:
        assert not foreign_format(file.read_bytes(), Document(file).content), file


def test_a_mistake_in_a_file_of_dlcp_is_still_reported_as_one(tmp_path) -> None:
    (path := tmp_path / "net.yaml").write_text("hosts: [a, b]\nswitches: [s]\nlinks: 3\n")
    with pytest.raises(DocumentError, match=r"net.yaml:3: links: expected a list, got 3"):
        Document(path).convert(NetworkFile)
    path.write_text("hosts: [a, b]\nswitches: [s\nlinks: [{nodes: [a, s], bandwidth: 1}]\n")
    with pytest.raises(DocumentError) as found:
        Document(path)
    assert "this is" not in str(found.value)
