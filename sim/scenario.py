# SPDX-License-Identifier: Apache-2.0
"""Describe a simulation: the network, its transports, failures, and the seed. Nothing here runs.

A `NetworkSetting` describes everything but the jobs. Jobs say what is sent: a `CollectiveJob` in a `Scenario`, training
jobs in an experiment (`dlcp.sim.experiment.RunSetting`), or any SimPy process that submits graphs to a
`dlcp.sim.simulation.Simulation`.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dlcp.document import PlaceError
from dlcp.error_text import nearest
from dlcp.sim.switches import SwitchSpec
from dlcp.sim.topology import Star, TopologySpec
from dlcp.sim.traffic import TrafficSpec
from dlcp.sim.transports import TRANSPORTS_MAX, DctcpTransport, TransportSpec

_Count = Annotated[int, Meta(ge=1)]
_Seconds = Annotated[float, Meta(ge=0)]


class CollectiveJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The simplest job: in each step, compute and then all-reduce one buffer.

    Parameters
    ----------
    hosts
        One host per rank.
    size_bytes
        Size of the buffer that the ranks reduce in each step.
    collective
        ``ring``, ``direct`` (every rank owns a shard: reduce-scatter and all-gather in one hop each) or
        ``parameter_server`` (through the first ``servers`` of ``hosts``; the rest are workers).
    compute_s
        Time from the end of a step's all-reduce to the beginning of the next.
    loss_bound
        The share of a contribution's packets that may be lost, if the transport bounds loss. Results are always
        delivered whole.
    queue
        Queue of the gradients; 7 is the most urgent.
    """

    name: str
    hosts: tuple[int, ...]
    size_bytes: _Count
    collective: Literal["ring", "direct", "parameter_server"] = "ring"
    transport: str = "dctcp"
    servers: _Count = 1
    steps: _Count = 1
    compute_s: _Seconds = 0.0
    start_s: _Seconds = 0.0
    loss_bound: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    queue: Annotated[int, Meta(ge=0, le=7)] = 4


class FailureSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A link that loses packets or fails for a while, in both directions.

    Parameters
    ----------
    nodes
        Names of the two ends, as in `dlcp.sim.topology.NetworkTopology.names`: ``host3``, ``leaf0``, …
    loss_ratio
        Share of packets lost at random. 1 is a failed link; routes avoid it ``reroute_s`` after the failure.
    """

    nodes: tuple[str, str]
    loss_ratio: Annotated[float, Meta(ge=0, le=1)] = 1.0
    start_s: _Seconds = 0.0
    stop_s: Annotated[float, Meta(gt=0)] = float("inf")
    reroute_s: _Seconds = 0.0


class NetworkSetting(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything but the jobs: the network, transports, background traffic, failures, and the seed.

    Parameters
    ----------
    transports
        Transports by the names that jobs and traffic use.
    stop_s
        Latest end of a run in simulated time; packets may still be in flight.
    """

    topology: TopologySpec = msgspec.field(default_factory=Star)
    switches: SwitchSpec = msgspec.field(default_factory=SwitchSpec)
    transports: Annotated[dict[str, TransportSpec], Meta(max_length=TRANSPORTS_MAX)] = msgspec.field(
        default_factory=lambda: {"dctcp": DctcpTransport()}
    )
    traffic: tuple[TrafficSpec, ...] = ()
    failures: tuple[FailureSpec, ...] = ()
    seed: Annotated[int, Meta(ge=0)] = 1
    stop_s: Annotated[float, Meta(gt=0)] = 3600.0

    def check_senders(self, **senders: Sequence[Any]) -> None:
        """Reject unknown transports, and jobs or traffic with the same name; ``senders`` are by field.

        Raises
        ------
        dlcp.document.PlaceError
            A sender is wrong; ``steps`` lead to its place.
        """
        every = [(field, number, spec) for field, specs in senders.items() for number, spec in enumerate(specs)]
        for field, number, spec in every:
            if spec.transport not in self.transports:
                known = nearest(spec.transport, self.transports)
                raise PlaceError(f"there is no transport {spec.transport!r}{known}", field, number, "transport")
        names = [spec.name for _, _, spec in every]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise PlaceError(f"two jobs or kinds of traffic are called {twice!r}; rename one of them")


class Scenario(NetworkSetting, frozen=True, kw_only=True):
    """A complete simulation with collective jobs."""

    jobs: tuple[CollectiveJob, ...] = ()
