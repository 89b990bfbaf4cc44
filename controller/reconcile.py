# SPDX-License-Identifier: Apache-2.0
"""Finds what a switch lacks of what it should hold, and writes that and nothing else."""

import time
from dataclasses import dataclass

from dlcp.controller.difference import Difference, difference
from dlcp.controller.entries import entries
from dlcp.controller.fabric import Fabric, Switch
from dlcp.controller.pipeline import Pipeline
from dlcp.controller.session import Session
from finsy.proto import p4r


@dataclass(frozen=True)
class Plan:
    """What one switch has to be told.

    Parameters
    ----------
    switch
        Which one.
    install
        Whether it has to be given the program first, which empties its tables.
    difference
        What has to be written to its tables.
    """

    switch: Switch
    install: bool
    difference: Difference

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return self.install or len(self.difference) > 0


@dataclass(frozen=True)
class Outcome:
    """What was done to one switch.

    Parameters
    ----------
    plan
        What had to be done.
    writes
        Write requests that it took.
    elapsed_s
        How long it took from the first question on, in seconds.
    """

    plan: Plan
    writes: int
    elapsed_s: float


def wanted(fabric: Fabric, switch: Switch, pipeline: Pipeline) -> list[p4r.Entity]:
    """Return everything that a switch of a fabric should hold.

    Raises
    ------
    PipelineError
        The program has no room for it, in name or in width.
    """
    return pipeline.encode(entries(fabric, switch.name))


async def plan(session: Session, should_hold: list[p4r.Entity]) -> Plan:
    """Return what a switch has to be told so that it holds what it should; asks, and changes nothing.

    Raises
    ------
    ControlError
        It does not answer.
    """
    install = await session.cookie() != session.pipeline.cookie
    holds = [] if install else await session.entities()
    return Plan(session.switch, install, difference(should_hold, holds))


async def reconcile(session: Session, should_hold: list[p4r.Entity]) -> Outcome:
    """Make a switch hold what it should. What is right already is not touched; ``session`` must be the primary.

    Raises
    ------
    ControlError
        It does not answer, or refuses a change.
    """
    start = time.monotonic()
    before = session.writes
    found = await plan(session, should_hold)
    if found.install:
        await session.install()
    for batch in found.difference.batches():
        await session.write(batch)
    return Outcome(found, session.writes - before, time.monotonic() - start)
