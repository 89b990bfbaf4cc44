# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to the network or a rank: right gradients, the framework's all-reduce instead, or a named error."""

import os
import re
import signal
import socket
import subprocess
import threading
import time

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from dlcp import wire
from dlcp.values.tags import TagPolicy
from tests.faults.bad_network import BadNetwork, Weather, place_of, set_weather
from tests.faults.fault_training import Said, train
from tests.torch.workers import WAYS, launch, values
from tests.transport.free_ports import free_udp_ports
from tests.waiting import until

pytestmark = pytest.mark.timeout(230)
LIMIT_S = 200
"""For several trainings in a row on a busy machine."""
RANKS = 3
EXACT = 2e-6
"""Rounding of an average of three numbers of size 1."""
QUICK = {"silence_s": 1.2, "deadline_s": 4.0, "meet_s": 5.0, "payload_bytes": 1440}
ALL_DROPPABLE = TagPolicy((0, 0, 0, 0, 0, 0, 0, 1), (0, 0, 0, 0, 0, 0, 0, 1), small_layer_values=0)
STEPS = 3
WEATHER_STEPS = 2
LAST = 2
"""In the forward pass of step 1 DDP talks to all ranks itself, to agree on its buckets; from step 2 on it does not."""
LAZY = {"TORCH_GLOO_LAZY_INIT": "1"}
"""Groups connect when they are used: too late if a rank has died."""


def options_of(worker, **changes):
    """Options with which packets go through the bad network, or through memory where the environment says so."""
    there = {} if worker.environment.get("DLCP_SHARED_MEMORY") == "1" else {"advertise": place_of(worker.rank)}
    return worker.options(**{**there, **QUICK, **changes})


def change(worker, weather):
    """Let rank 0 change the weather, while the others wait."""
    dist.barrier()
    if worker.rank == 0:
        set_weather(weather)
    dist.barrier()


WEATHER = {
    "nothing": Weather(),
    "1 % loss": Weather(loss=0.01),
    "5 % loss": Weather(loss=0.05),
    "30 % loss": Weather(loss=0.30),
    "bursts": Weather(burst=0.003),
    "duplicates": Weather(duplicate=0.3),
    "disorder": Weather(reorder=0.2),
    "forgeries": Weather(forged=0.2),
    "all at once": Weather(loss=0.02, burst=0.001, duplicate=0.05, reorder=0.05, forged=0.05),
}


def through_all_weather(worker):
    said, results = Said(), {}
    for name, weather in WEATHER.items():
        change(worker, weather)
        # A busy machine may leave a rank silent for seconds; a test of the deadline needs a shorter silence.
        patience = {"deadline_s": 2.5} if weather.loss > 0.1 else {"deadline_s": 20.0, "silence_s": 6.0}
        whole = options_of(worker, loss_bound=0.0, precision=32, **patience)
        results[name, 0.0] = train(worker, whole, WEATHER_STEPS, said=said)
        # A busy machine may look congested, so that fewer bits are sent.
        precision = "32" if name == "nothing" else "auto"
        lossy = options_of(worker, loss_bound=0.1, tag_policy=ALL_DROPPABLE, precision=precision, **patience)
        results[name, 0.1] = train(worker, lossy, WEATHER_STEPS, said=said)
    return results


@pytest.fixture(scope="module")
def weathered():
    ports = free_udp_ports(RANKS)
    with BadNetwork(ports, seed=5) as network:
        results = values(
            launch(RANKS, through_all_weather, ports=ports, environment=network.environment(), limit_s=LIMIT_S)
        )
        assert min(network.seen[what] for what in ("lost", "duplicated", "reordered", "forged")) > 50, network.seen
    return results


def assert_went_on(weather, rank, result):
    """DLCP went on; or, where a third of all packets is lost, the framework did once the deadline had passed."""
    if weather == "30 % loss" and result.said:
        assert rank == 0
        assert len(result.said) == 1
        assert not result.active[-1]
    elif weather != "30 % loss":
        assert result.active == [True] * WEATHER_STEPS, result.said
        assert result.said == []


@pytest.mark.parametrize("weather", WEATHER)
def test_reliable_averages_are_exact_in_any_weather(weathered, weather):
    for rank, results in enumerate(weathered):
        result = results[weather, 0.0]
        assert result.error_max < EXACT, rank
        assert result.same_on_all
        assert_went_on(weather, rank, result)
        assert result.summary["lost"] == 0


@pytest.mark.parametrize("weather", WEATHER)
def test_bounded_loss_stays_within_the_bound_and_is_owed_in_any_weather(weathered, weather):
    for rank, results in enumerate(weathered):
        result = results[weather, 0.1]
        assert result.same_on_all, "replicas must not drift"
        assert_went_on(weather, rank, result)
        assert result.summary["violations"] == 0
        assert result.summary["max_message_ratio"] <= 0.1
        if result.active[-1]:
            assert result.missing < 1e-4, "what was not averaged is owed"


def test_without_loss_on_the_path_a_loss_bound_changes_no_gradient(weathered):
    for results in weathered:
        assert results["nothing", 0.1].error_max < EXACT
        assert results["nothing", 0.1].summary["lost"] == 0


BREAKS = {
    ("blocked", 0.1): Weather(blocked=True),
    ("blocked ring", 0.0): Weather(blocked=True),
    ("blocked at 8 bits", 0.1): Weather(blocked=True),
}


def broken_in_the_middle(worker):
    said, results = Said(), {}
    for (name, bound), weather in BREAKS.items():
        change(worker, Weather())

        def break_at_one(step, state, weather=weather):
            if step == 1:
                change(worker, weather)

        collective = "ring" if "ring" in name else "direct"
        limits = {"loss_bound": bound, "deadline_s": 2.5, "precision": 8 if "8 bits" in name else 32}
        chosen = options_of(worker, tag_policy=ALL_DROPPABLE, collective=collective, **limits)
        results[name, bound] = train(worker, chosen, STEPS, before_step=break_at_one, said=said)
    change(worker, Weather())

    # The network breaks while buckets are on their way, at a different moment on each step of the loop.
    for moment in range(3):
        change(worker, Weather(loss=0.05))

        def break_soon(step, state, moment=moment):
            dist.barrier()
            if step == 1 and worker.rank == 0:
                threading.Timer(0.004 * moment, set_weather, [Weather(blocked=True)]).start()

        results["moment", moment] = train(
            worker,
            options_of(worker, loss_bound=0.0, silence_s=1.0, precision=32),
            STEPS,
            before_step=break_soon,
            said=said,
        )
    return results


@pytest.fixture(scope="module")
def broken():
    ports = free_udp_ports(RANKS)
    with BadNetwork(ports, seed=6) as network:
        return values(
            launch(RANKS, broken_in_the_middle, ports=ports, environment=network.environment(), limit_s=LIMIT_S)
        )


def assert_fell_back(results, what, steps_with_dlcp):
    for rank, by_name in enumerate(results):
        result = by_name[what]
        assert result.same_on_all, (rank, what)
        assert result.active == [step < steps_with_dlcp for step in range(STEPS)], (rank, result)
        off = [message for message in result.said if "DLCP is off" in message]
        assert len(off) == (rank == 0), f"rank 0 says it, once: {result.said}"
        assert result.reason


@pytest.mark.parametrize(("name", "bound"), BREAKS)
def test_a_network_that_breaks_in_the_middle_costs_no_gradient(broken, name, bound):
    assert_fell_back(broken, (name, bound), 1)
    for results in broken:
        result = results[name, bound]
        assert result.missing < 1e-4
        if bound == 0.0:
            assert result.error_max < EXACT


@pytest.mark.parametrize("moment", range(3))
def test_the_moment_at_which_it_breaks_makes_no_difference(broken, moment):
    for results in broken:
        result = results["moment", moment]
        assert result.error_max < EXACT
        assert result.same_on_all
        assert result.active[-1] is False


NARROW_DEADLINE_S = 40.0
NARROW = {
    "direct": ({}, Weather(swallow_over=600)),
    "ring": ({"collective": "ring"}, Weather(swallow_over=1300)),
    "bounded": ({"loss_bound": 0.1, "precision": 8}, Weather(swallow_over=600, loss=0.05)),
    "barely": ({}, Weather(swallow_over=100)),
}


def narrower_in_the_middle(worker):
    said, results = Said(), {}
    for name, (fields, weather) in NARROW.items():
        change(worker, Weather())

        def narrow_at_one(step, state, weather=weather):
            if step == 1:
                change(worker, weather)

        chosen = options_of(worker, **{"loss_bound": 0.0, "precision": 32, "deadline_s": NARROW_DEADLINE_S} | fields)
        results[name] = train(worker, chosen, STEPS, before_step=narrow_at_one, said=said)
    change(worker, Weather())
    return results


@pytest.fixture(scope="module")
def narrower():
    ports = free_udp_ports(RANKS)
    with BadNetwork(ports, seed=8) as network:
        return values(
            launch(RANKS, narrower_in_the_middle, ports=ports, environment=network.environment(), limit_s=LIMIT_S)
        )


@pytest.mark.parametrize("name", NARROW)
def test_a_path_that_becomes_too_narrow_is_crossed_in_pieces(narrower, name):
    weather = NARROW[name][1]
    for rank, results in enumerate(narrower):
        result = results[name]
        assert result.active == [True] * STEPS, (rank, result.reason)
        assert result.same_on_all
        assert name == "bounded" or result.error_max < EXACT
        assert result.missing < 1e-4
        assert result.seconds[1] < NARROW_DEADLINE_S / 2, "some timeouts, and not the deadline"
        said = [message for message in result.said if "no longer arrive" in message]
        assert said
        assert all(f"packets of {result.payload_bytes} bytes" in message for message in said)
        for message in said:
            assert int(re.search(r"those of (\d+) do", message)[1]) + wire.HEADER_BYTES <= weather.swallow_over


def unfit_from_the_start(worker):
    said, results = Said(), {}

    change(worker, Weather(swallow_over=1300))
    results["black hole"] = train(worker, options_of(worker, payload_bytes=0, precision=32), STEPS, said=said)

    change(worker, Weather(swallow_over=300))
    results["tiny packets only"] = train(worker, options_of(worker), STEPS, said=said)

    change(worker, Weather(blocked=True))
    results["blocked"] = train(worker, options_of(worker, meet_s=3.0), STEPS, said=said)

    change(worker, Weather())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        if worker.rank == 1:
            taken.bind(("127.0.0.1", worker.port))
        dist.barrier()
        results["port in use"] = train(worker, options_of(worker), STEPS, said=said)
    dist.barrier()

    results["other options"] = train(worker, options_of(worker, loss_bound=0.05 * worker.rank), STEPS, said=said)
    results["one without"] = train(worker, options_of(worker, meet_s=1.5), STEPS, enable=worker.rank != 1, said=said)
    return results


@pytest.fixture(scope="module")
def unfit():
    ports = free_udp_ports(RANKS)
    with BadNetwork(ports, seed=7) as network:
        return values(
            launch(RANKS, unfit_from_the_start, ports=ports, environment=network.environment(), limit_s=LIMIT_S)
        )


def test_an_mtu_black_hole_is_found_before_training(unfit):
    for rank, results in enumerate(unfit):
        result = results["black hole"]
        assert result.active == [True] * STEPS
        assert result.payload_bytes == 1216, "the largest that passes: an MTU of 1280"
        assert result.error_max < EXACT
        assert len(result.said) == (rank == 0), result.said
        assert not result.said or "do not get through" in result.said[0]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("tiny packets only", ["do not get through", "check the MTU"]),
        ("blocked", ["no UDP packet", "firewall"]),
        ("port in use", ["rank 1", "cannot bind UDP", "Address already in use"]),
        ("other options", ["rank 1 loss_bound=0.05", "same"]),
    ],
)
def test_what_cannot_work_is_said_once_and_the_framework_averages(unfit, what, words):
    assert_fell_back(unfit, what, 0)
    for results in unfit:
        assert results[what].error_max < EXACT
        for word in words:
            assert word in results[what].reason
    assert unfit[0][what].reason in unfit[0][what].said[0]


def test_a_rank_without_dlcp_is_named_and_the_framework_averages(unfit):
    for rank, results in enumerate(unfit):
        result = results["one without"]
        assert result.error_max < EXACT
        assert result.same_on_all
        assert result.active == [False] * STEPS
        assert sum("rank 1 has not joined" in message for message in result.said) == (rank == 0)


def others_need_no_more(worker, step):
    """Return whether this is rank 2 in its last step, once all others are through with the comparison before it."""
    store = dist.distributed_c10d._get_default_store()
    if step == LAST and worker.rank != 2:
        store.add("in the last step", 1)
    if step != LAST or worker.rank != 2:
        return False
    until(lambda: store.add("in the last step", 0) >= RANKS - 1, "not all ranks came to the last step")
    return True


def paused(worker):
    said, results = Said(), {}
    change(worker, Weather())
    for name, seconds in (("shortly", 0.6), ("long", 3.0)):

        def pause_at_last(step, state, seconds=seconds):
            if others_need_no_more(worker, step):
                pause(seconds)

        results[name] = train(
            worker, options_of(worker, silence_s=1.5, deadline_s=8.0), STEPS, before_step=pause_at_last, said=said
        )
    return results


def pause(seconds):
    """Stop this process as a debugger or a frozen host would, from outside, for some seconds."""
    subprocess.Popen(["/bin/sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize("way", WAYS)
def test_a_paused_rank_is_waited_for_or_done_without_dlcp(way):
    ports = free_udp_ports(RANKS)
    with BadNetwork(ports) as network:
        environment = network.environment() | WAYS[way]
        results = values(launch(RANKS, paused, ports=ports, environment=environment))
    for rank, by_name in enumerate(results):
        assert by_name["shortly"].active == [True] * STEPS
        assert by_name["long"].active == [True, True, False]
        assert any("rank 2" in message for message in by_name["long"].said) == (rank == 0), by_name["long"].said
        for result in by_name.values():
            assert result.error_max < EXACT
            assert result.same_on_all


def lost_for_good(worker, how):
    change(worker, Weather())

    def go_at_last(step, state):
        if others_need_no_more(worker, step):
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGSTOP)

    began_s = time.monotonic()
    chosen = options_of(worker, silence_s=1.0, deadline_s=2.0)
    try:
        train(worker, chosen, STEPS, before_step=go_at_last)
    except Exception as error:
        return str(error), time.monotonic() - began_s
    return None


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("how", "gloo"), [("killed", {}), ("killed", LAZY), ("stopped", {})])
def test_a_rank_lost_for_good_is_an_error_that_names_it(how, gloo, way):
    ports = free_udp_ports(RANKS)
    with BadNetwork(ports) as network:
        environment = network.environment() | WAYS[way] | gloo
        outcomes = launch(RANKS, lost_for_good, how, ports=ports, environment=environment, limit_s=30, lost={2})
    for outcome in outcomes[:2]:
        message, seconds = outcome.value
        assert f"step {LAST}" in message, message
        assert "rank 2" in message
        assert "parts." in message, "the layers"
        assert "TransportError" in message, "DDP shows what the hook's future failed with"
        assert "the framework's own all-reduce cannot take over" in message
        assert seconds < 25, "Gloo's own timeout, of 30 s, is not waited for"
