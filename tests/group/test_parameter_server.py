# SPDX-License-Identifier: Apache-2.0
"""A parameter server joins the ranks' session by its address alone, whoever comes first, and leaves with a reason."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from dlcp.inputs.addresses import format_address
from dlcp.session import NotJoinedError, Options
from tests.families import both_families
from tests.group.group_ranks import serving, start_process, together
from tests.transport.free_ports import free_port
from tests.waiting import until

SHAPE = (400, 100)
STEPS = 5
"""The first two are in full precision."""


def named(server):
    return format_address(server.address)


def options(server, **fields):
    return Options(collective=f"server:{server}", meet_s=10.0, **fields)


def gradient(rank, step, dtype=np.float32):
    return np.random.default_rng([rank, step]).standard_normal(SHAPE).astype(dtype)


def train(group, dtype=np.float32, steps=STEPS):
    group.register(["weight"])
    got = []
    for step in range(steps):
        mine = gradient(group.rank, step, dtype)
        group.average({"weight": mine})
        got.append(mine)
    told = np.full(3, group.rank)
    group.broadcast(told, root=1)
    assert told.tolist() == [1, 1, 1]
    return got


def assert_exact(results):
    for got in results:
        for step, average in enumerate(got):
            wanted = (gradient(0, step, average.dtype) + gradient(1, step, average.dtype)) / 2
            np.testing.assert_allclose(average, wanted, rtol=1e-6)


def command(address, *words, **variables):
    """Start ``dlcp server`` as a process."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DLCP_")}
    return subprocess.Popen(
        [sys.executable, "-m", "dlcp.cli", "server", "--bind", address, *words],
        env=environment | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_it_takes_all_options_from_its_workers():
    lines, invitations = [], []
    with serving(lines.append) as server:
        join = server._join
        server._join = lambda told: invitations.append(told) or join(told)
        asked = options(
            named(server), job=7, precision="8", loss_bound=0.2, tagged=False, congestion="cubic",
            payload_bytes=512, deadline_s=20.0, fallback=False,
        )  # fmt: skip

        def look(group):
            results = train(group)
            if group.rank == 0:
                (own,) = server._servers.values()
                ours, workers = own.endpoint.connection, group.endpoint.connection
                mine, theirs = ours.options, workers.options
                assert (ours.membership.job, ours.membership.token) == (7, workers.membership.token)
                for name in ("tagged", "congestion", "payload_bytes", "silence_s", "deadline_s"):
                    assert getattr(mine, name) == getattr(theirs, name), name
                assert own.server.options == group.options.reduction()
                assert invitations[0]["token"] != ours.membership.token, "it is not sent as it is"
            group.barrier()
            return results

        first, second = together(2, look, asked)
        for one, other in zip(first, second, strict=True):
            np.testing.assert_array_equal(one, other)
    assert lines == ["job 7 with 2 workers begins", "job 7 with 2 workers has ended"]


@both_families
def test_one_server_serves_sessions_of_any_format_beside_each_other(family):
    with serving(bind=format_address((family.loopback, 0))) as server:
        results = {}

        def session(dtype):
            asked = options(named(server), loss_bound=0.0, fallback=False)
            results[dtype] = together(2, lambda group: train(group, dtype), asked)

        threads = [threading.Thread(target=session, args=(dtype,)) for dtype in (np.float32, np.float64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for dtype in (np.float32, np.float64):
            assert_exact(results[dtype])
            assert results[dtype][0][0].dtype == dtype
        assert len(server.ledgers) == 2


@pytest.mark.parametrize("first", ["server", "workers"])
def test_whoever_comes_first_waits_for_the_other(first):
    address = f"127.0.0.1:{free_port()}"
    asked = options(address, loss_bound=0.0, fallback=False)
    found = []
    workers = threading.Thread(target=lambda: found.extend(together(2, train, asked)))
    if first == "workers":
        workers.start()
        time.sleep(1.0)  # they ask in vain meanwhile, which nobody but they could tell
    server = command(address)
    try:
        assert server.stdout.readline() == f"server ready at {address}\n"
        if first == "server":
            workers.start()
        workers.join()
        assert_exact(found)
    finally:
        server.terminate()
    assert server.wait(10) == 0
    assert server.stdout.read() == "job 0 with 2 workers begins\njob 0 with 2 workers has ended\n"


def test_a_server_of_another_secret_is_not_joined(tmp_path):
    files = [tmp_path / "workers", tmp_path / "server"]
    for file in files:
        file.touch(mode=0o600)
        file.write_text(f"the secret of the {file.name}, long enough")
    with serving(secret_file=str(files[1])) as server:
        asked = options(named(server), secret_file=str(files[0]), fallback=False)
        with pytest.raises(
            NotJoinedError, match=r"the store of the parameter server at .* belongs to another job.*its secret differs"
        ):
            together(2, train, asked)
        assert not server.ledgers


def test_nobody_at_the_servers_address_is_said(caplog):
    address = f"127.0.0.1:{free_port()}"
    assert_exact(together(2, train, options(address).with_(meet_s=2.0)))
    assert f"no answer from the store of the parameter server at {address}" in caplog.text
    assert "Training continues with the store" in caplog.text


def test_a_server_of_another_version_refuses(monkeypatch):
    lines = []
    with serving(lines.append) as server:
        join = server._join
        said = rf"server at {named(server)} refuses: it has DLCP .* and the workers 0.0; install the same everywhere"
        with monkeypatch.context() as patched:
            patched.setattr(server, "_join", lambda told: join(told | {"version": "0.0"}))
            with pytest.raises(NotJoinedError, match=said):
                together(2, train, options(named(server), fallback=False))
        assert_exact(together(2, train, options(named(server), loss_bound=0.0, fallback=False)))
    assert lines[0].startswith("refused: it has DLCP")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_without_its_server_training_goes_on_and_says_why(how, caplog):
    address = f"127.0.0.1:{free_port()}"
    server = command(address)
    assert "server ready" in server.stdout.readline()

    def stopped(group):
        group.register(["weight"])
        got = []
        for step in range(STEPS):
            if step == 2 and group.rank == 0:
                server.send_signal(how)
                server.wait()
            group.barrier()
            mine = gradient(group.rank, step)
            group.average({"weight": mine})
            got.append(mine)
        return got, group.reason

    results = together(2, stopped, options(address, loss_bound=0.0, silence_s=1.0))
    assert_exact([averages for averages, _ in results])
    for _, reason in results:
        assert ("has been silent" if how is signal.SIGKILL else "the parameter server was stopped") in reason
        assert "rank 2 is the parameter server" in reason
    assert "Training continues with the store" in caplog.text


def test_a_server_leaves_ranks_whose_process_has_ended():
    lines = []
    with serving(lines.append) as server:
        script = (
            "import os, time, numpy, dlcp.session\n"
            "group = dlcp.session.join()\n"
            "group.register(['weight'])\n"
            "group.average({'weight': numpy.ones(1000, numpy.float32)})\n"
            "group.barrier()\n"
            "time.sleep(1 - group.rank)\n"  # rank 0 serves the store, and goes when the other has long been gone
            "os._exit(9)\n"
        )
        port = free_port()
        variables = {"DLCP_COLLECTIVE": f"server:{named(server)}", "DLCP_FALLBACK": "0"}
        ranks = [start_process(rank, 2, port, script, **variables) for rank in range(2)]
        for rank in ranks:
            assert rank.wait(30) == 9, rank.communicate()
        until(lambda: len(lines) >= 2)
        assert lines[1].startswith("job 0 with 2 workers has ended: ")
        assert "rank 0" in lines[1] or "rank 1" in lines[1]
        assert_exact(together(2, train, options(named(server), loss_bound=0.0, fallback=False)))
