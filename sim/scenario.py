# SPDX-License-Identifier: Apache-2.0
"""What is simulated: a network, how its hosts send, what fails, and the seed. Nothing here runs.

A `NetworkSetting` has everything that packets need. Jobs say what is sent: `CollectiveJob` in a `Scenario`, training in
the settings of experiments (`dlcp.sim.experiment.RunSetting`), or any SimPy process that submits graphs to a
`dlcp.sim.simulation.Simulation`.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dlcp.document import PlaceError
from dlcp.sim.switches import SwitchSpec
from dlcp.sim.topology import Star, TopologySpec
from dlcp.sim.traffic import TrafficSpec
from dlcp.sim.transports import TRANSPORTS_MAX, DctcpTransport, TransportSpec
from dlcp.suggestion import nearest

_Count = Annotated[int, Meta(ge=1)]
_Seconds = Annotated[float, Meta(ge=0)]


class CollectiveJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Steps of computing and all-reducing one buffer: the simplest job.

    Parameters
    ----------
    hosts
        By rank.
    size_bytes
        Of the buffer that the ranks reduce in each step.
    collective
        ``ring``, ``direct`` (every rank owns a shard: reduce-scatter and all-gather in one hop each) or
        ``parameter_server`` (through the first ``servers`` of ``hosts``; the rest are workers).
    compute_s
        From the end of a step's all-reduce to the beginning of the next.
    loss_bound
        The share of a contribution's packets that may be lost, with a transport that bounds loss. Results are always
        delivered whole.
    queue
        Of gradients; 7 is the most urgent.
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
        The two ends by name, as in `dlcp.sim.topology.NetworkTopology.names`: ``host3``, ``leaf0``, …
    loss_ratio
        Share of packets lost at random. 1 is a failed link, which routes avoid from ``reroute_s`` after the failure on.
    """

    nodes: tuple[str, str]
    loss_ratio: Annotated[float, Meta(ge=0, le=1)] = 1.0
    start_s: _Seconds = 0.0
    stop_s: Annotated[float, Meta(gt=0)] = float("inf")
    reroute_s: _Seconds = 0.0


class NetworkSetting(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that packets need: the network, how hosts send, what others send, what fails, and the seed.

    Parameters
    ----------
    transports
        By the names that jobs and traffic use.
    stop_s
        When a run ends at the latest, whatever is still in flight; simulated time.
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
        """Refuse jobs and traffic of one name, and transports that there are not; ``senders`` are by field.

        Raises
        ------
        dlcp.document.PlaceError
            Its steps lead to what is wrong.
        """
        every = [(field, number, spec) for field, specs in senders.items() for number, spec in enumerate(specs)]
        for field, number, spec in every:
            if spec.transport not in self.transports:
                known = nearest(spec.transport, self.transports)
                raise PlaceError(f"there is no transport {spec.transport!r}{known}", field, number, "transport")
        names = [spec.name for _, _, spec in every]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise PlaceError(f"two jobs or kinds of traffic are called {twice!r}; names have to differ")


class Scenario(NetworkSetting, frozen=True, kw_only=True):
    """A whole simulation with jobs of the simplest kind."""

    jobs: tuple[CollectiveJob, ...] = ()
