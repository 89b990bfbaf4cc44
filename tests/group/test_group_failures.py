# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to a rank or its path: the exact average over the store, or an error that names it, and soon."""

import logging
import signal
import threading
import time

import numpy as np
import pytest

import dlcp.session
from dlcp.session import NotJoinedError, Options
from dlcp.session.store import StoreError
from dlcp.session.training_session import SessionPhase
from dlcp.transport import TransportError
from tests.faults.bad_network import BadNetwork, Weather
from tests.group.group_ranks import LIMIT_S, PROCESSES_LIMIT_S, ends_of, on_ranks, start_process, together
from tests.transport.free_ports import free_port, free_udp_ports

QUICK = Options(silence_s=1.2, deadline_s=5.0, meet_s=30.0, payload_bytes=1440)
PATIENT = QUICK.with_(silence_s=10 * LIMIT_S, deadline_s=20 * LIMIT_S)
"""Both waits outlast the test's limit: a test that passes has waited for neither."""
NAMES = ["front", "middle", "back"]
TRAINING = """
import os, signal, sys, time
import numpy as np
import dlcp.session
logging = __import__("logging").basicConfig()
with dlcp.session.join(dlcp.session.Options(silence_s=float(sys.argv[3]), deadline_s=float(sys.argv[4]))) as group:
    group.register(["front", "back"])
    for step in range(1000):
        if group.rank == int(sys.argv[1]) and step == 4:
            os.kill(os.getpid(), getattr(signal, sys.argv[2]))
        group.average({"front": np.ones(50_000, np.float32), "back": np.ones(9, np.float32)})
        if step == 3:
            print("three", flush=True)
        time.sleep(0.002)  # a pace
"""


def gradients(rank, step, values=20_000):
    generator = np.random.default_rng([rank, step])
    return {name: generator.standard_normal(values).astype(np.float32) for name in NAMES}


def mean(size, step):
    return {name: np.mean([gradients(rank, step)[name] for rank in range(size)], 0) for name in NAMES}


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_is_killed_ends_the_others_with_its_name(dead):
    port = free_port()
    processes = [start_process(rank, 3, port, TRAINING, dead, "SIGKILL", 200, 300) for rank in range(3)]
    # Whoever waited for a deadline would be late.
    ends = ends_of(processes)
    assert processes[dead].returncode == -signal.SIGKILL
    for rank in {0, 1, 2} - {dead}:
        output, errors = ends[rank]
        assert output == "three\n"
        assert processes[rank].returncode == 1
        last = errors.strip().splitlines()[-1]
        assert "TransportError" in last
        assert f"rank {dead} " in last
        assert "step 4" in last or "step 5" in last or dead == 0


def test_a_rank_that_stands_still_is_named_with_step_and_layer():
    port = free_port()
    processes = [start_process(rank, 2, port, TRAINING, 1, "SIGSTOP", 1.5, 4) for rank in range(2)]
    try:
        _, errors = processes[0].communicate(timeout=PROCESSES_LIMIT_S)
    finally:
        processes[1].kill()
        processes[1].communicate()
    last = errors.strip().splitlines()[-1]
    assert "rank 1" in last
    assert "step 3" in last or "step 4" in last
    assert "front" in last or "back" in last


def test_a_process_that_raises_tells_the_others_why():
    port = free_port()
    code = """
import numpy as np, dlcp.session
group = dlcp.session.join()
group.register(["w"])
for step in range(1000):
    group.average({"w": np.ones(5, np.float32)})
    if group.rank == 1 and step == 3:
        raise ZeroDivisionError("out of luck")
"""
    processes = [start_process(rank, 2, port, code) for rank in range(2)]
    errors = [errors for _, errors in ends_of(processes)]
    assert [process.returncode for process in processes] == [1, 1]
    last = errors[0].strip().splitlines()[-1]
    assert "TransportError" in last
    assert "rank 1 gives up: ZeroDivisionError('out of luck')" in last


def test_a_rank_that_raises_tells_the_others_why():
    master = f"127.0.0.1:{free_port()}"

    def one(rank):
        with dlcp.session.join(PATIENT, rank=rank, size=3, master=master) as group:
            group.register(NAMES)
            group.average(gradients(rank, 0))
            if rank == 1:
                raise ZeroDivisionError("out of luck")
            group.average(gradients(rank, 1))

    found = on_ranks(3, one)
    assert isinstance(found[1], ZeroDivisionError)
    for rank in (0, 2):
        assert isinstance(found[rank], TransportError)
        assert "out of luck" in str(found[rank])


def test_a_rank_that_does_not_come_is_named():
    master = f"127.0.0.1:{free_port()}"
    options = QUICK.with_(meet_s=0.8, fallback=False)
    found = on_ranks(3, lambda rank: dlcp.session.join(options, rank=rank, size=3, master=master), only=[0, 2])
    for error in found.values():
        assert isinstance(error, NotJoinedError)
        assert "rank 1 has not joined: check that it runs, and calls dlcp.session.join" in str(error)


def test_without_rank_0_there_is_no_store():
    with pytest.raises(StoreError, match="check that rank 0 is running"):
        dlcp.session.join(QUICK.with_(meet_s=0.3), rank=1, size=2, master=f"127.0.0.1:{free_port()}")


def test_a_path_that_passes_no_udp_is_gone_around(caplog):
    ports = free_udp_ports(3)
    with BadNetwork(ports) as network, caplog.at_level(logging.WARNING, "dlcp"):
        network.weather = Weather(blocked=True)
        results = together(3, train_and_broadcast, through(network, ports, meet_s=2.0))
    for got, mode, reason in results:
        assert mode is SessionPhase.FALLBACK
        assert "gets no UDP packet through" in reason
        for step, averages in enumerate(got):
            for name, wanted in mean(3, step).items():
                np.testing.assert_allclose(averages[name], wanted, atol=1e-6)
                np.testing.assert_array_equal(averages[name], results[0][0][step][name])
    assert sum("DLCP is off" in message for message in caplog.messages) == 1


def train_and_broadcast(group):
    group.register(NAMES)
    values = np.full(5000, group.rank)
    group.broadcast(values, 1)
    assert (values == 1).all()
    got = []
    for step in range(3):
        got.append(gradients(group.rank, step))
        group.average(got[-1])
    group.barrier()
    return got, group._session.phase, group.reason


def through(network, ports, **changes):
    return [
        QUICK.with_(bind=f"127.0.0.1:{port}", advertise=f"{host}:{place}", loss_bound=0.0, **changes)
        for port, (host, place) in zip(ports, network.places, strict=True)
    ]


@pytest.mark.parametrize("collective", ["direct", "ring"])
def test_a_path_that_fails_while_training_costs_no_gradient(collective, caplog):
    ports = free_udp_ports(3)
    turn = threading.Barrier(3)
    with BadNetwork(ports) as network, caplog.at_level(logging.WARNING, "dlcp"):

        def train(group):
            group.register(NAMES)
            got = []
            for step in range(6):
                turn.wait(LIMIT_S)
                if step == 2 and group.rank == 0:
                    # From the middle of a step on nothing passes any more.
                    threading.Timer(0.004, lambda: setattr(network, "weather", Weather(blocked=True))).start()
                got.append(gradients(group.rank, step))
                group.average(got[-1])
            return got, group.active, group.reason

        results = together(3, train, through(network, ports, collective=collective, precision="32"))
    for got, active, reason in results:
        assert not active
        assert "rank" in reason
        for step, averages in enumerate(got):
            for name, wanted in mean(3, step).items():
                np.testing.assert_allclose(averages[name], wanted, atol=1e-6)
                np.testing.assert_array_equal(averages[name], results[0][0][step][name])
    assert sum("DLCP is off after step" in message for message in caplog.messages) == 1


def test_what_is_owed_is_paid_when_the_store_takes_over():
    ports = free_udp_ports(2)
    with BadNetwork(ports, seed=1) as network:

        def train(group):
            group.register(["w"])
            total = np.zeros(60_000)
            for step in range(6):
                group.barrier()
                if group.rank == 0 and step in (0, 4):
                    network.weather = Weather(loss=0.04) if step == 0 else Weather(blocked=True)
                group.barrier()
                values = np.random.default_rng([step, group.rank]).standard_normal(60_000).astype(np.float32)
                group.average({"w": values})
                total += values
            return total, group.active, group.ledger.summary()["lost"]

        options = [one.with_(loss_bound=0.1, immediate=True, payload_bytes=1440) for one in through(network, ports)]
        results = together(2, train, options)
    parts = [np.random.default_rng([step, rank]).standard_normal(60_000) for step in range(6) for rank in range(2)]
    assert sum(lost for _, _, lost in results) > 0
    for total, active, _ in results:
        assert not active
        np.testing.assert_allclose(total, np.sum(parts, 0) / 2, atol=1e-4)


def test_without_fallback_a_failure_is_an_error_on_all_ranks():
    ports = free_udp_ports(2)
    with BadNetwork(ports) as network:

        def train(group):
            group.register(NAMES)
            group.average(gradients(group.rank, 0))
            group.barrier()
            network.weather = Weather(blocked=True)
            with pytest.raises(TransportError, match=r"step 1.*rank|rank.*step 1"):
                group.average(gradients(group.rank, 1))
            with pytest.raises(TransportError):
                group.average(gradients(group.rank, 2))

        together(2, train, through(network, ports, fallback=False))


def test_a_parameter_that_nobody_starts_is_named_by_the_deadline():
    def train(group):
        group.register(NAMES)
        group.average(gradients(group.rank, 0))
        future = group.start("front", gradients(group.rank, 1)["front"])
        with pytest.raises(TransportError, match=r"step 1: rank . has not started back, middle in 0\.7 s"):
            future.result(LIMIT_S)
        with pytest.raises(TransportError, match="has not started"):
            group.end_step()

    together(2, train, QUICK.with_(deadline_s=0.7))


def test_closing_a_group_in_mid_step_tells_whoever_waits():
    def train(group):
        group.register(NAMES)
        group.average(gradients(group.rank, 0))
        future = group.start("front", gradients(group.rank, 1)["front"])
        group.close()
        with pytest.raises(TransportError, match="has closed its group"):
            future.result(LIMIT_S)

    together(2, train, QUICK)


def test_rank_0_keeps_the_store_until_the_others_have_left():
    code = """
import time, dlcp.session
from dlcp.session.store import StoreChannel
def take_late(channel, name, rank, end_s, take=StoreChannel._take):
    time.sleep(0.4 * channel.rank)  # who comes so late is what is tested
    return take(channel, name, rank, end_s)
group = dlcp.session.join()
StoreChannel._take = take_late
group.barrier()
"""
    port = free_port()
    processes = [start_process(rank, 3, port, code) for rank in range(3)]
    errors = [errors for _, errors in ends_of(processes)]
    assert [process.returncode for process in processes] == [0, 0, 0], errors


def test_a_rank_that_lags_behind_can_use_dlcp_though_rank_0_has_long_been_done():
    """The store is there as long as somebody may need it; here for four times what counts as silence."""
    code = """
import os, time, numpy as np, dlcp.session
group = dlcp.session.join(dlcp.session.Options(silence_s=0.5, deadline_s=30, meet_s=30))
group.register(["w"])
group.average({"w": np.ones(50_000, np.float32)})
group.barrier()
if group.rank == 1:
    time.sleep(2)  # passing time is what is tested
    print(group.active, group.reason)
"""
    port = free_port()
    processes = [start_process(rank, 2, port, code) for rank in range(2)]
    found = ends_of(processes)
    assert [process.returncode for process in processes] == [0, 0], found
    assert found[1][0] == "True \n"


def test_why_rank_0_gives_up_is_heard_over_the_store_too():
    """Where no UDP passes, its store is all that others have; it goes with rank 0, but not before they know."""
    code = """
import os, time, numpy as np, dlcp.session
group = dlcp.session.join(dlcp.session.Options(advertise="127.0.0.1:9", meet_s=2.0))
assert not group.active
group.register(["w"])
group.average({"w": np.ones(5, np.float32)})
if group.rank == 0:
    raise ZeroDivisionError("out of luck")
time.sleep(0.8)  # rank 0 gives up meanwhile; asking would be hearing of it
group.average({"w": np.ones(5, np.float32)})
"""
    port = free_port()
    processes = [start_process(rank, 2, port, code) for rank in range(2)]
    errors = [errors for _, errors in ends_of(processes)]
    assert [process.returncode for process in processes] == [1, 1]
    assert "rank 0 gives up: ZeroDivisionError('out of luck')" in errors[1].strip().splitlines()[-1]


def test_rank_0_waits_for_one_that_stays_no_longer_than_it_was_told():
    master = f"127.0.0.1:{free_port()}"
    brief = QUICK.with_(deadline_s=1.0)
    groups = on_ranks(2, lambda rank: dlcp.session.join(brief, rank=rank, size=2, master=master))
    began_s = time.monotonic()
    groups[0].close()
    assert brief.deadline_s <= time.monotonic() - began_s < brief.meet_s
    groups[1].close()


def test_a_group_is_closed_while_its_recovery_begins(monkeypatch):
    ports = free_udp_ports(2)
    begins = threading.Event()

    class LateThread(threading.Thread):
        def start(self):
            if self.name == "dlcp-recovery":
                begins.set()
                time.sleep(0.3)  # holds the moment open that is tested
            super().start()

    with BadNetwork(ports) as network:

        def train(group):
            group.register(["w"])
            group.average({"w": np.ones(5, np.float32)})
            group.barrier()
            network.weather = Weather(blocked=True)
            group.start("w", np.ones(5, np.float32))
            assert begins.wait(LIMIT_S)

        monkeypatch.setattr("dlcp.session.training_session.threading.Thread", LateThread)
        together(2, train, through(network, ports))


def test_models_that_differ_are_an_error_on_all_ranks():
    master = f"127.0.0.1:{free_port()}"

    def one(rank):
        with dlcp.session.join(PATIENT, rank=rank, size=2, master=master) as group:
            group.register(["w"])
            group.average({"w": np.zeros(5000 + rank * 7, np.float32)})

    found = on_ranks(2, one)
    for error in found.values():
        assert isinstance(error, TransportError)
        assert "w" in str(error)


def test_a_closed_group_refuses():
    group = dlcp.session.join(rank=0, size=1)
    group.register(["w"])
    group.close()
    group.close()
    with pytest.raises(RuntimeError, match="has been closed"):
        group.average({"w": np.zeros(1, np.float32)})


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"RANK": "1"}, "the size is unknown: set RANK and WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "the rank is unknown"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, r"the rank must be in 0\.\.1, got 2"),
        ({"RANK": "two", "WORLD_SIZE": "2"}, "RANK must be a number, got 'two'"),
    ],
)
def test_an_environment_that_makes_no_sense(variables, problem, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=problem):
        dlcp.session.join()


def test_alone_without_a_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with dlcp.session.join() as group:
        group.register(["w"])
        values = np.full(3, 7, np.float32)
        group.average({"w": values})
        assert (values == 7).all()
        assert (group.rank, group.size, group.step, group.endpoint) == (0, 1, 1, None)
        assert "group of one" in group.reason
