# SPDX-License-Identifier: Apache-2.0
"""A trace is a job like others: in scenarios, in experiments and on the command line."""

import gzip
import json

import msgspec
import pytest

from dlcp import cli
from dlcp.cli import main
from dlcp.sim import simulate
from dlcp.sim.experiments.experiment import ExperimentRun, RunSetting, read
from dlcp.sim.experiments.running import digest, run
from dlcp.sim.experiments.trace_experiment import job_graph, write_trace
from dlcp.sim.scenario import CollectiveJob, TraceJob
from dlcp.sim.traces.chakra import write_chakra
from dlcp.sim.traces.operations import (
    OperationKind,
    RankOperation,
    TraceFormatError,
    Workload,
    workload_graph,
)
from dlcp.sim.traces.traced_jobs import place_traces, read_trace
from tests.sim.experiments_small import PROFILE
from tests.sim.test_goal import PING_PONG
from tests.sim.test_profiler_trace import dlcp_trace, on_gpu
from tests.sim.traced_graphs import scenario


@pytest.fixture
def goal(tmp_path):
    path = tmp_path / "job.goal"
    path.write_text(PING_PONG)
    return path


def test_a_scenario_repeats_a_trace(goal):
    job = TraceJob(name="job", file=str(goal), repeat=3, hosts=(2, 0), start_s=1e-5)
    result = simulate(scenario(traces=(job,)), engine="reference")
    (steps,) = result.steps
    assert (steps.begin_ps, len(steps.end_ps)) == (10_000_000, 3)
    assert len(result.messages) == 6
    assert set(result.messages["source"].tolist()) == {0, 2}
    again = simulate(scenario(traces=(job,)), engine="reference")
    assert again.steps == result.steps


def hosts_of(jobs, others, hosts):
    return [job.hosts for job in place_traces(jobs, others, hosts, seed=1)]


def others(*hosts):
    return [CollectiveJob(name="other", hosts=hosts, size_bytes=1)]


def test_traces_and_jobs_get_hosts_of_their_own(goal):
    jobs = [TraceJob(name=str(number), file=str(goal)) for number in range(2)]
    assert hosts_of(jobs, others(1), 5) == [(0, 2), (3, 4)]
    assert hosts_of([TraceJob(name="a", file=str(goal), hosts=(2, 1)), jobs[0]], (), 4) == [(2, 1), (0, 3)]
    assert hosts_of([TraceJob(name="a", file=str(goal), placement="spread")], (), 8) == [(0, 4)]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"hosts": (0, 1, 2)}, "has 2 ranks, and needs as many hosts from 0 to 3; 3 different ones are given"),
        ({"hosts": (0, 9)}, "host 9 does not exist"),
        ({"ranks": 4}, "`ranks` is for a single file of one rank; this trace has 2 of its own"),
        ({"file": "gone.goal"}, r"there is neither this file nor gone\.goal\.0\.et"),
    ],
)
def test_a_job_that_cannot_be_placed_is_refused(goal, more, message):
    with pytest.raises(ValueError, match=message):
        place_traces([TraceJob(**{"name": "a", "file": str(goal), **more})], (), 4, seed=1)


def test_too_few_hosts_are_refused(goal):
    with pytest.raises(ValueError, match="has 2 ranks, and 1 of 4 hosts are free; use a larger topology"):
        place_traces([TraceJob(name="a", file=str(goal))], others(0, 1, 2), 4, seed=1)


def test_formats_are_recognized(tmp_path, goal):
    compressed = tmp_path / "job.goal.gz"
    compressed.write_bytes(gzip.compress(goal.read_bytes()))
    (tmp_path / "run.json").write_text(json.dumps({"traceEvents": dlcp_trace()}))
    profiles = tmp_path / "profiles"
    profiles.mkdir()
    for rank in range(2):
        (profiles / f"{rank}.json.gz").write_bytes(gzip.compress(json.dumps(on_gpu(rank)).encode()))
    for name in ("job.goal.gz", "run.json", "profiles", "profiles/0.json.gz"):
        assert len(read_trace(TraceJob(name="a", file=str(tmp_path / name))).ranks) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"something", r"not a trace: expected GOAL \(num_ranks \.\.\.\), Chakra"),
        (b'{"traceEvents": [{', "not complete JSON"),
        (b'{"other": 1}', "JSON without traceEvents"),
        (gzip.compress(b"num_ranks 1" * 100, mtime=0)[:-9], "Compressed file ended"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, content, message):
    (tmp_path / "job").write_bytes(content)
    with pytest.raises(TraceFormatError, match=message):
        read_trace(TraceJob(name="a", file=str(tmp_path / "job")))


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(TraceFormatError, match="the folder has no profiles"):
        read_trace(TraceJob(name="a", file=str(tmp_path)))


# Experiments ----------------------------------------------------------------------------------------------------------

EXPERIMENT = """\
name: traced
title: A trace beside another job
question: Does it run?
setting:
  topology: {kind: star, hosts: 8, host_link: {rate_gbps: 10}}
  transports: {tcp: {kind: cubic}}
  training:
    - {name: job, model: PROFILE, workers: 4, transport: tcp, steps: 2}
  traces:
    - {name: replayed, file: TRACE, transport: tcp, repeat: 2}
"""


@pytest.fixture
def experiment(tmp_path, goal):
    (tmp_path / "profile.yaml").write_text(PROFILE)
    path = tmp_path / "traced.yaml"
    text = EXPERIMENT.replace("PROFILE", str(tmp_path / "profile.yaml")).replace("TRACE", str(goal))
    path.write_text(text)
    return path


def test_an_experiment_runs_a_trace_beside_training(experiment, goal):
    (item,) = read(experiment).runs
    document = run(item, engine="reference")
    assert document["complete"]
    assert [(each["name"], len(each["step_s"])) for each in document["jobs"]] == [("job", 2), ("replayed", 2)]
    before = digest(item)
    goal.write_text(PING_PONG.replace("1500", "2500"))
    assert digest(item) != before, "a changed trace runs again"


def test_mistakes_are_found_where_they_are(experiment, goal):
    goal.write_text(PING_PONG.replace("l2 requires l1\n  l4", "l2 requires l9\n  l4"))
    message = rf"traced\.yaml:10: setting\.traces\[0\]\.file: {goal}:7: rank 0 has no operation with the label 'l9'"
    with pytest.raises(ValueError, match=message):
        read(experiment)


def run_of(setting: dict) -> dict:
    item = ExperimentRun(
        experiment="a", point={}, setting=msgspec.convert(setting, RunSetting), convergence="published"
    )
    return run(item, engine="reference")


@pytest.mark.parametrize("collective", ["ring", "direct", "parameter_server", "tree"])
def test_a_training_job_takes_as_long_as_its_trace(tmp_path, collective):
    (tmp_path / "profile.yaml").write_text(PROFILE)
    network = {
        "topology": {"kind": "star", "hosts": 6, "host_link": {"rate_gbps": 10}},
        "transports": {"d": {"kind": "dlcp"}},
        "switches": {"discipline": "dlcp"},
    }
    job = {"name": "job", "model": str(tmp_path / "profile.yaml"), "workers": 4, "collective": collective}
    job |= {"servers": 2} if collective == "parameter_server" else {}
    job |= {"scheduler": "dlcp", "transport": "d", "steps": 2, "jitter": 0.1, "loss_bound": 0.1}
    setting = {**network, "training": [job]}
    files = write_trace(job_graph(msgspec.convert(setting, RunSetting)), tmp_path / "job.et")
    traced = {"name": "job", "file": str(files[0]), "transport": "d"}
    (took,) = run_of({**network, "traces": [traced]})["jobs"][0]["step_s"]
    assert took == pytest.approx(sum(run_of(setting)["jobs"][0]["step_s"]), rel=1e-8)


def test_only_a_job_that_there_is_can_be_written(experiment, tmp_path):
    (item,) = read(experiment).runs
    with pytest.raises(ValueError, match="the experiment has 2 jobs; choose one with --job; it has job, replayed"):
        job_graph(item.setting)
    with pytest.raises(ValueError, match=r"there is no job 'replay'; did you mean replayed\?"):
        job_graph(item.setting, "replay")
    with pytest.raises(ValueError, match=r"the name has to end in \.goal or \.et"):
        write_trace(job_graph(item.setting, "replayed"), tmp_path / "job.txt")


# The command line -----------------------------------------------------------------------------------------------------


def dlcp(*words) -> int:
    return cli.main([str(word) for word in words])


def test_a_trace_is_imported_and_exported(goal, tmp_path, capsys):
    file = tmp_path / "job.yaml"
    assert dlcp("sim", "import", goal, "--topology", "leaf_spine", "--rate-gbps", "25", "--output", file) == 0
    out = capsys.readouterr().out
    assert "2 ranks, 2 computations (at most 2e-06 s on a rank), 2 messages (2,880 bytes), 0 collectives" in out
    (item,) = read(file).runs
    assert item.setting.topology.host_link.rate_gbps == 25
    assert dlcp("sim", "export", file, "--output", tmp_path / "again.et") == 0
    assert "again.0.et to " in capsys.readouterr().out
    assert len(read_trace(TraceJob(name="a", file=str(tmp_path / "again"))).ranks) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--topology", "leafspine"], "--topology: there is no 'leafspine'; did you mean leaf_spine?"),
        (["--transport", "tcp"], "--transport: there is no 'tcp'"),
        (["--collective", "rings"], "--collective: there is no 'rings'; did you mean ring?"),
        (["--ranks", "3"], "`ranks` is for a single file of one rank"),
        (["--output", "."], "--output: . is a folder; give a file"),
    ],
)
def test_a_wrong_command_line_is_refused(goal, capsys, words, message):
    assert dlcp("sim", "import", goal, *words) == 2
    assert message in capsys.readouterr().err


def test_a_trace_runs_on_a_network_from_a_file(goal, tmp_path, capsys):
    file = tmp_path / "network.yaml"
    links = "links: [{between: [a, s]}, {between: [b, s]}, {between: [c, s]}]"
    file.write_text(f"hosts: [a, b, c]\nswitches: [s]\n{links}\n")
    assert dlcp("sim", "replay", goal, "--topology", file) == 0
    numbers = capsys.readouterr().out
    assert dlcp("sim", "replay", goal) == 0
    assert capsys.readouterr().out == numbers, "a star, too, with the same rates and delays"
    assert dlcp("sim", "import", goal, "--topology", file, "--output", tmp_path / "own.yaml") == 0
    assert str(file) in (tmp_path / "own.yaml").read_text()
    assert dlcp("sim", "replay", goal, "--topology", file, "--rate-gbps", "10") == 2
    assert "have their own rates and delays; leave --rate-gbps out" in capsys.readouterr().err
    file.write_text("hosts: [a]\nswitches: [s]\nlinks: [{between: [a, s]}]\n")
    assert dlcp("sim", "replay", goal, "--topology", file) == 2
    assert "network.yaml" in capsys.readouterr().err


def test_a_wrong_trace_is_refused_on_the_command_line(goal, capsys):
    goal.write_text(PING_PONG[:100])
    assert dlcp("sim", "replay", goal) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"dlcp sim: {goal}:")
    assert "rank 0" in error


TWO = "num_ranks 2\nrank 0 {\nsend 9b to 1\n}\nrank 1 {\nrecv 9b from 0\n}\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rate-gbps", "1e-12"], "--rate-gbps: must be at least 0.004, got 1e-12"),
        (["--rate-gbps", "nan"], "--rate-gbps: must lie in (0, 10000]"),
        (["--rate-gbps", "9000", "--topology", "leaf_spine", "--ranks", "1"], "`ranks` is for a single file"),
        (["--repeat", "1000000000"], "--repeat: must be at most 100,000, got 1000000000"),
        (["--ranks", "1000000"], "--ranks: must be at most 65,536"),
        (["--flops", "1e-300"], "--flops: must be at least 1, got 1e-300"),
        (["--delay-us", "inf"], "--delay-us: must lie in"),
        (["--groups", "GROUPS"], "groups.json.1: expected a list, got 'x'"),
    ],
)
def test_options_beyond_their_limits_are_refused_by_name(tmp_path, capsys, options, message) -> None:
    (tmp_path / "two.goal").write_text(TWO)
    (tmp_path / "groups.json").write_text('{"1": "x"}')
    options = [each.replace("GROUPS", str(tmp_path / "groups.json")) for each in options]
    try:
        status = main(["sim", "replay", str(tmp_path / "two.goal"), *options])
    except SystemExit as ended:  # argparse
        status = ended.code
    assert status == 2
    assert message in capsys.readouterr().err


def test_fabric_links_that_would_be_too_fast_are_refused(tmp_path, capsys) -> None:
    ranks = "".join(f"rank {rank} {{\ncalc 5\n}}\n" for rank in range(16))
    (tmp_path / "many.goal").write_text(f"num_ranks 16\n{ranks}")
    command = ["sim", "replay", str(tmp_path / "many.goal"), "--topology", "leaf_spine", "--rate-gbps", "9000"]
    assert main(command) == 2
    assert "the fabric's links need 18,000 Gbit/s, 2 times the hosts'; at most 10,000" in capsys.readouterr().err


def test_the_folder_of_a_chakra_trace_stands_for_its_files(tmp_path, capsys) -> None:
    (tmp_path / "two.goal").write_text(TWO)
    (tmp_path / "ets").mkdir()
    job = TraceJob(name="a", file=str(tmp_path / "two.goal"))
    graph = workload_graph(read_trace(job), range(2), 0).graph
    write_chakra(graph, tmp_path / "ets" / "job")
    assert main(["sim", "import", str(tmp_path / "ets")]) == 0
    assert "2 ranks" in capsys.readouterr().out
    write_chakra(graph, tmp_path / "ets" / "other")
    assert main(["sim", "import", str(tmp_path / "ets")]) == 2
    assert "the folder has 2 Chakra traces; name job.0.et or another" in capsys.readouterr().err


def test_a_job_says_that_network_interfaces_are_one(tmp_path, capsys) -> None:
    text = TWO.replace("send 9b to 1", "send 9b to 1\nsend 9b to 1 nic 1").replace(
        "recv 9b from 0", "recv 9b from 0\n" * 2
    )
    (tmp_path / "two.goal").write_text(text)
    for action in ("import", "replay"):
        assert main(["sim", action, str(tmp_path / "two.goal")]) == 0
        assert "simplified: 1 ranks use up to 2 network interfaces (nic)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("goal", "status", "says"),
    [
        (PING_PONG.replace("rank 0 {", "rank 0 {\n  long: calc 4000000000000"), 1, "raise it, or make the job"),
        (PING_PONG.replace("1440b", "17592186044416b"), 2, "the number of packets of a message of 17,592"),
    ],
)
def test_replay_says_how_to_change_settings_that_it_has_no_option_for(tmp_path, capsys, goal, status, says) -> None:
    (path := tmp_path / "a.goal").write_text(goal)
    assert main(["sim", "replay", str(path)]) == status
    err = capsys.readouterr().err
    assert says in err
    assert "`dlcp sim import --output FILE` writes an experiment, where these settings can be changed" in err


def test_links_that_no_switch_can_buffer_for_are_named(tmp_path, capsys) -> None:
    (path := tmp_path / "a.goal").write_text(PING_PONG)
    options = ["--transport", "nscc", "--delay-us", "1e6"]
    for command in (["replay"], ["import", "--output", str(tmp_path / "a.yaml")]):
        assert main(["sim", *command, str(path), *options]) == 2
        assert "the switches' buffer, five bandwidth-delay products in packets, is" in capsys.readouterr().err


def test_only_a_collectives_messages_between_nodes_cross_the_network():
    operation = RankOperation(OperationKind.COLLECTIVE, "sum", "job", size_bytes=4000, group=(0, 1, 2, 3))
    workload = Workload("job", [[operation]] * 4)
    sent = {}
    for ranks in (1, 2):
        nodes = workload_graph(workload, [7, 5, 3, 1], 0, TraceJob(name="t", file="", ranks_per_node=ranks)).graph.nodes
        sends = nodes[nodes["size_bytes"] > 0]
        sent[ranks] = sorted(zip(sends["source"].tolist(), sends["target"].tolist(), strict=True))
    assert set(sent[1]) == {(7, 5), (5, 3), (3, 1), (1, 7)}
    assert sent[2] == [pair for pair in sent[1] if pair in ((5, 3), (1, 7))]


def test_ranks_that_all_share_a_node_are_refused(tmp_path, capsys):
    (path := tmp_path / "a.goal").write_text(PING_PONG)
    assert main(["sim", "replay", str(path), "--ranks-per-node", "2"]) == 2
    assert "2 ranks, all on one node: nothing would cross the network" in capsys.readouterr().err
