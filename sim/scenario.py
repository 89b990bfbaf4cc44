# SPDX-License-Identifier: Apache-2.0
"""What is simulated: a network, how its hosts send, what goes wrong, and the seed. Nothing here runs.

All are frozen records with the unit in each name; files are converted to them with msgspec. A `Scenario` says
everything that the packets need. What is sent is told by jobs: `CollectiveJob` here, or any SimPy process that submits
graphs of messages to a `dlcp.sim.simulation.Simulation`.
"""

from typing import Annotated, Literal

import msgspec
from dlcp.sim.switches import SwitchSpec
from dlcp.sim.topology.specs import Star, TopologySpec
from dlcp.sim.transports import Dctcp, TransportSpec
from msgspec import Meta

Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]
Ratio = Annotated[float, Meta(ge=0, le=1)]


class CollectiveJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Steps of computing and of exchanging one buffer, the simplest job there is.

    Parameters
    ----------
    hosts
        Who takes part, in order of rank.
    size_bytes
        What every rank has to exchange in a step.
    collective
        ``ring``, ``direct`` (every rank owns a shard: reduce-scatter and all-gather in one hop each) or
        ``parameter_server`` (to the first ``servers`` of ``hosts``, the rest are workers).
    compute_s
        From the end of a step's exchange to the beginning of the next one.
    loss_bound
        The share of a reduce message that may be lost, with a transport that bounds loss. What comes back from who
        has reduced it is always delivered whole.
    queue
        Of gradients; 7 is the most urgent.
    """

    name: str
    hosts: tuple[int, ...]
    size_bytes: Count
    collective: Literal["ring", "direct", "parameter_server"] = "ring"
    transport: str = "dctcp"
    servers: Count = 1
    steps: Count = 1
    compute_s: Seconds = 0.0
    start_s: Seconds = 0.0
    loss_bound: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    queue: Annotated[int, Meta(ge=0, le=7)] = 4


class BackgroundSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Flows between random hosts, arriving as a Poisson process.

    Parameters
    ----------
    load
        Share of the sum of the hosts' link rates that the flows ask for.
    sizes
        Flow sizes as a cumulative distribution: (bytes, probability that a flow is no larger), ascending; the last
        probability is 1. Sizes between are interpolated.
    hosts
        Who takes part; all if empty.
    """

    name: str
    load: Annotated[float, Meta(gt=0, lt=1)]
    sizes: tuple[tuple[float, float], ...]
    transport: str = "dctcp"
    hosts: tuple[int, ...] = ()
    start_s: Seconds = 0.0
    stop_s: Seconds = 1.0


class FailureSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A link that loses packets or fails for a while, in both directions.

    Parameters
    ----------
    nodes
        The two ends by name, as `dlcp.sim.topology.network.Network.names` gives them: ``host3``, ``leaf0``, …
    loss_ratio
        Share of packets lost at random; 1 is a failed link, which routes avoid from ``reroute_s`` after the failure on.
    """

    nodes: tuple[str, str]
    loss_ratio: Ratio = 1.0
    start_s: Seconds = 0.0
    stop_s: Annotated[float, Meta(gt=0)] = float("inf")
    reroute_s: Seconds = 0.0


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A whole simulation.

    Parameters
    ----------
    transports
        By the names that jobs and background refer to.
    stop_s
        When the simulation ends at the latest, whatever is still on its way.
    """

    topology: TopologySpec = msgspec.field(default_factory=Star)
    switches: SwitchSpec = msgspec.field(default_factory=SwitchSpec)
    transports: dict[str, TransportSpec] = msgspec.field(default_factory=lambda: {"dctcp": Dctcp()})
    jobs: tuple[CollectiveJob, ...] = ()
    background: tuple[BackgroundSpec, ...] = ()
    failures: tuple[FailureSpec, ...] = ()
    seed: Annotated[int, Meta(ge=0)] = 1
    stop_s: Annotated[float, Meta(gt=0)] = 3600.0
