# SPDX-License-Identifier: Apache-2.0
"""Keeps the switches of a fabric as they should be: after a restart, a lost connection, or somebody's meddling."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Final

from dlcp.controller import bmv2, readings
from dlcp.controller.entries import entries
from dlcp.controller.fabric import Fabric, Switch
from dlcp.controller.metrics import SwitchState
from dlcp.controller.pipeline import Pipeline
from dlcp.controller.reconcile import Outcome, reconcile
from dlcp.controller.session import ELECTION_ID, ControlError, Session

EVERY_S: Final = 5.0
"""How often state is compared and counters are read. Chosen by us: more often than Prometheus usually asks."""
RETRY_S: Final = 0.25
RETRY_MAX_S: Final = 5.0
"""How long to wait before another attempt at a switch that does not answer: at first, and at most. Chosen by us."""
LOGGER: Final = logging.getLogger("dlcp.fabric")


class Watcher:
    """Keeps all switches of a fabric as they should be.

    Parameters
    ----------
    fabric, pipeline
        What should be.
    election_id
        Of several controllers the one with the highest writes; the others stand by to take its place.
    every_s
        How often to compare and to read counters, in seconds. A lost connection is noticed at once.

    Attributes
    ----------
    states
        What is known of each switch, by name.

    Raises
    ------
    PipelineError
        What a switch should hold does not fit the program.
    """

    def __init__(
        self, fabric: Fabric, pipeline: Pipeline, *, election_id: int = ELECTION_ID, every_s: float = EVERY_S
    ) -> None:
        self._pipeline, self._election_id, self._every_s = pipeline, election_id, every_s
        self._entries = {switch.name: entries(fabric, switch.name) for switch in fabric.switches}
        self._wanted = {name: pipeline.encode(found) for name, found in self._entries.items()}
        self._switches = tuple(switch for switch in fabric.switches if switch.grpc)
        self.states: Mapping[str, SwitchState] = {
            switch.name: SwitchState(frozenset(fabric.neighbours[switch.name])) for switch in self._switches
        }

    async def run(self) -> None:
        """Keep them so until cancelled."""
        await asyncio.gather(*(self._keep(switch) for switch in self._switches))

    async def _keep(self, switch: Switch) -> None:
        """Connect again and again, more slowly the longer nobody answers."""
        state = self.states[switch.name]
        retry_s = RETRY_S
        said = ""
        while True:
            before = state.reconciles
            try:
                async with Session(switch, self._pipeline, election_id=self._election_id) as session:
                    await session.become_primary(stand_by=True)
                    await self._hold(session, state)
            except (ControlError, bmv2.QueueDepthError) as error:
                state.failures += 1
                if str(error) != said:  # once is enough for as long as it stays the same
                    LOGGER.warning("%s", error)
                said = str(error)
            finally:
                state.connected = False
            retry_s = RETRY_S if state.reconciles > before else min(2 * retry_s, RETRY_MAX_S)
            await asyncio.sleep(retry_s)

    async def _hold(self, session: Session, state: SwitchState) -> None:
        """Compare, restore and read for as long as the connection lasts."""
        first = True
        while True:
            outcome = await reconcile(session, self._wanted[session.switch.name])
            self._note(outcome, state)
            if first or outcome.plan.install:
                await self._set_depths(session.switch)
            first = False
            state.connected = True
            state.readings = await readings.read(session, state.ports)
            done, _ = await asyncio.wait([session.lost], timeout=self._every_s)
            for lost in done:
                lost.result()

    async def _set_depths(self, switch: Switch) -> None:
        """Set what BMv2 forgets when it starts and P4Runtime cannot tell."""
        if switch.kind != "bmv2":
            return
        reason = bmv2.unavailable(switch)
        if reason:
            LOGGER.warning("%s", reason)
        else:
            await bmv2.set_depths(switch, self._entries[switch.name].ports)

    def _note(self, outcome: Outcome, state: SwitchState) -> None:
        plan = outcome.plan
        counts = plan.difference.counts()
        state.reconciles += 1
        state.installs += plan.install
        state.changes.update(counts)
        state.writes += outcome.writes
        state.elapsed_s = outcome.elapsed_s
        if plan:
            LOGGER.info(
                "switch %s: %s%d inserted, %d modified, %d deleted, %d right already, in %.2f s",
                plan.switch.name,
                "program installed, " if plan.install else "",
                counts["insert"],
                counts["modify"],
                counts["delete"],
                plan.difference.kept,
                outcome.elapsed_s,
            )
