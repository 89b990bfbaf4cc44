# SPDX-License-Identifier: Apache-2.0
"""`dlcp sim new`: the file that it writes runs unchanged, and explains its keys."""

import io
import os
import pty
import sys
import threading

import pytest

from dlcp.cli import main
from dlcp.sim.experiments.experiment import read
from dlcp.sim.experiments.fitted_network import FABRICS, TRANSPORT_KINDS, FittedNetwork
from dlcp.sim.graphs.collectives import CollectiveName
from dlcp.sim.network.topology import build_topology

NEW = ["sim", "new"]


def written(path, *options):
    """The only run of the file that the command writes with these options and its defaults."""
    assert main([*NEW, str(path), "--yes", "--force", *options]) == 0
    (item,) = read(path).runs
    return item.setting


def refusal(capsys, *words):
    assert main([*NEW, *words]) == 2
    return capsys.readouterr().err


def test_the_file_has_what_was_asked_for(tmp_path):
    path = tmp_path / "My first.yaml"
    options = {"model": "vgg16", "gpu": "p100", "workers": "12", "collective": "parameter_server", "fabric": "fat_tree"}
    options |= {"rate-gbps": "40", "transport": "dctcp", "discipline": "priority"}
    setting = written(path, *(f"--{name}={value}" for name, value in options.items()))
    (job,) = setting.training
    assert (job.model, job.gpu, job.gpu_precision, job.workers, job.servers) == ("vgg16", "p100", "single", 12, 3)
    assert (job.collective, job.transport, setting.switches.discipline) == ("parameter_server", "dctcp", "priority")
    assert setting.topology.host_link.rate_gbps == 40
    assert read(path).experiment.name == "my_first"
    text = path.read_text()
    assert "# How gradients are reduced. One of: parameter_server, byteps, ring" in text
    for name in ("model: vgg16", "workers: 12", "scheduler: fifo", "steps: 3", "seed: 1", "engine: packets"):
        assert name in text


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("hosts", [2, 7, 64, 300])
def test_every_fabric_is_as_large_as_the_job(fabric, hosts):
    found = build_topology(FittedNetwork(fabric).fields(hosts)["topology"]).hosts
    assert hosts <= found < max(2.5 * hosts + 72, 16)


@pytest.mark.parametrize("transport", TRANSPORT_KINDS)
def test_every_transport_gets_switches_that_suit_it(tmp_path, transport):
    for discipline in TRANSPORT_KINDS[transport].disciplines:
        written(tmp_path / "a.yaml", "--transport", transport, "--discipline", discipline)
    assert written(tmp_path / "a.yaml", "--transport", transport).switches.discipline == {
        "dlcp": "dlcp", "pfabric": "pfabric", "pias": "priority", "ndp": "trim", "nscc": "trim", "rccc": "trim"
    }.get(transport, "fifo")  # fmt: skip


@pytest.mark.parametrize("collective", CollectiveName.__args__)
def test_every_collective_gets_the_ranks_that_it_needs(tmp_path, collective):
    assert written(tmp_path / "a.yaml", "--collective", collective).training[0].collective == collective


@pytest.mark.parametrize(
    ("workers", "engine", "collective", "group"),
    [
        (256, "packets", "direct", 8),
        (1000, "flows", "hierarchical", 25),
        (1024, "flows", "halving_doubling", 8),
        (1021, "flows", "tree", 8),
    ],
)
def test_many_workers_are_flows_with_few_messages(tmp_path, capsys, workers, engine, collective, group):
    setting = written(tmp_path / "a.yaml", "--workers", str(workers))
    (job,) = setting.training
    assert (setting.engine, job.collective, job.group) == (engine, collective, group)
    assert ("simulated as flows" in capsys.readouterr().out) == (engine == "flows")


def test_many_workers_over_a_transport_that_flows_cannot_represent_are_packets(tmp_path):
    assert written(tmp_path / "a.yaml", "--workers", "300", "--transport", "pfabric").engine == "packets"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--model resnet5", "--model: there is no model 'resnet5'; did you mean resnet50 or resnet101?"),
        ("--model gpt_2_7b --gpu p100", "--gpu: there is no gpu 'p100'; did you mean"),
        ("--workers 1", "--workers: expected a whole number from 2"),
        ("--workers 12 --collective halving_doubling", "--collective: halving_doubling needs a power of two"),
        ("--rate-gbps 0", "--rate-gbps: expected a rate above 0"),
        ("--transport ndp --discipline fifo", "--discipline: there is no discipline 'fifo'; it has trim"),
        ("--workers 60000 --collective parameter_server", "the topology has 75000 hosts; it needs 2 to 65536"),
    ],
)
def test_a_wrong_answer_is_refused_with_the_nearest_right_one(tmp_path, capsys, options, message):
    path = tmp_path / "a.yaml"
    assert message in refusal(capsys, str(path), "--yes", *options.split())
    assert not path.exists()


def test_a_file_is_replaced_only_if_asked_for(tmp_path, capsys):
    path = tmp_path / "a.yaml"
    path.write_text("mine")
    assert "exists; give another name, or --force" in refusal(capsys, str(path), "--yes")
    assert path.read_text() == "mine"
    assert "ends in .yaml" in refusal(capsys, str(tmp_path / "a.txt"), "--yes")


def test_without_a_terminal_nothing_is_asked(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    message = refusal(capsys, str(tmp_path / "a.yaml"), "--model", "vgg16")
    assert "not a terminal" in message
    assert "--gpu" in message
    assert "--model" not in message


def test_a_person_is_asked_until_the_answer_is_right(tmp_path, capsys, monkeypatch):
    controller, terminal = pty.openpty()
    monkeypatch.setattr(sys, "stdin", os.fdopen(terminal))
    given = "rsnet50\nresnet50\n\n16\n\nfat_tree\nfast\n10\ndctcp\n\n"
    threading.Thread(target=os.write, args=(controller, given.encode())).start()
    path = tmp_path / "a.yaml"
    assert main([*NEW, str(path)]) == 0
    os.close(controller)
    (item,) = read(path).runs
    assert (item.setting.training[0].workers, item.setting.topology.host_link.rate_gbps) == (16, 10)
    assert list(item.setting.transports) == ["dctcp"]
    output = capsys.readouterr()
    assert "did you mean resnet50" in output.err + output.out
    assert "expected a rate" in (output.err + output.out).lower()
