# SPDX-License-Identifier: Apache-2.0
"""Runs of the demo's training on a testbed, with what hosts and switches say of them side by side."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Final

from dlcp.controller.fabric import Fabric
from dlcp.controller.testbed.agreement import compare, uncounted_tails
from dlcp.controller.testbed.errors import TestbedError
from dlcp.controller.testbed.place import TestbedPlace
from dlcp.controller.testbed.state import TestbedState

from dlcp.demo.background import Burst
from dlcp.demo.place import Shares
from dlcp.demo.run import Progress, Setup, Variant, execute_at
from dlcp.wire import Queue

BMV2_ENVIRONMENT: Final = {"DLCP_CONGESTION": "marks"}
"""Options for DLCP over BMv2. What has left BMv2's queues waits, first in first out, in a buffer of 128 packets before
its transmit thread. TCP keeps that full, so every packet is some 50 ms late at 32 Mbit/s however little DLCP sends;
control by delay would take that for a queue of its own making and all but stop. Marks tell of its own queue."""


@dataclass(frozen=True, slots=True)
class TestbedSetup(Setup):
    """What all runs on a testbed have in common.

    Parameters
    ----------
    switch
        What the switches are.
    shape
        What the fabric is, for people.
    one_port
        Whether all bursts of the background go into the parameter server's port. BMv2 has one transmit thread, so a
        congested port blocks the others: with one congested port it does what a switch would.
    """

    __test__ = False

    switch: str = "builtin"
    shape: str = "star"
    one_port: bool = False

    @property
    def command(self) -> str:
        """The command that makes the same runs."""
        collective = "ps" if self.server is not None else self.collective
        return (
            f"dlcp testbed run --switch {self.switch} --fabric {self.shape} --collective {collective} "
            f"--seed {self.seed} --steps {self.steps} --loss-bound {self.loss_bound:g}"
        )

    def bursts(self) -> list[Burst]:
        """Return the background's schedule, the same in every run."""
        # slots=True makes the class anew, so that super() without arguments would not find it.
        bursts = Setup.bursts(self)
        if not self.one_port or self.server is None:
            return bursts
        return [dataclasses.replace(burst, target=self.server) for burst in bursts]


def check(setup: TestbedSetup, state: TestbedState) -> None:
    """Refuse runs that the testbed cannot make.

    Raises
    ------
    TestbedError
        Too few hosts, or a pattern that the switches cannot carry as a switch would.
    """
    hosts = len(state.layout.hosts)
    if hosts < setup.hosts:
        raise TestbedError(f"the training takes {setup.hosts} hosts, the testbed has {hosts}; choose another fabric")
    if state.layout.kind == "bmv2" and setup.server is None:
        raise TestbedError(
            "all-reduce congests several ports at once, and BMv2's one transmit thread makes them block one another: "
            "choose --collective ps, or the built-in switch"
        )


def train(
    state: TestbedState, fabric: Fabric, setup: TestbedSetup, variant: Variant, *, progress: Progress
) -> dict[str, Any]:
    """Run one variant, and return its record with a part ``agreement``.

    Raises
    ------
    DemoError
        A process failed or did not end in time.
    TestbedError
        A switch cannot be programmed or does not answer.
    """
    places: list[TestbedPlace] = []

    def make_place(setup: Setup, shares: Shares | None, job: int) -> TestbedPlace:
        place = TestbedPlace(state, fabric, setup, shares, job)
        places.append(place)
        return place

    if state.layout.kind == "bmv2" and variant.mode == "dlcp":
        variant = dataclasses.replace(variant, environment={**variant.environment, **BMV2_ENVIRONMENT})
    record = execute_at(make_place, setup, variant, progress=progress)
    accounts = places[0].accounts
    assert accounts is not None
    tagged = variant.mode == "dlcp" and variant.environment.get("DLCP_TAGGED") != "0"
    ledgers = [ledger for ledger in (record["ledger"], record["server_ledger"]) if ledger is not None]
    record["agreement"] = compare(state.layout, accounts, ledgers, tagged=tagged)
    record["fabric"] |= {"switch": setup.switch, "shape": setup.shape, "switches": len(state.layout.switches)}
    record["fabric"]["idle"] = accounts.idle
    uncounted = uncounted_tails(state.layout, accounts)
    if uncounted is not None and not accounts.restarts:
        # Gradients among them are known from the ledgers, and said there; here they count as ordinary traffic.
        record["switch"]["tail_drops"] += uncounted
        ordinary = record["switch"]["by_queue"].setdefault(str(int(Queue.ORDINARY)), {"packets": 0, "bytes": 0})
        ordinary["tail_drops"] = ordinary.get("tail_drops", 0) + uncounted
    return record
