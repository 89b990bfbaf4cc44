# SPDX-License-Identifier: Apache-2.0
"""What a user can choose. An argument beats the environment (``DLCP_*``), that a file, and that the default."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dlcp import configuration
from dlcp.collectives.choice import COLLECTIVES, Topology, flow_weight
from dlcp.tags import TagPolicy
from dlcp.transport import LossBound, TransportOptions
from dlcp.transport.path_mtu import PAYLOAD_UNKNOWN


@dataclass(frozen=True, slots=True)
class Options:
    """How DLCP exchanges gradients. Every field of a simple type can be set as ``DLCP_<NAME>``.

    Parameters
    ----------
    loss_bound
        The largest share of a message's packets that may be lost, 0 to 1. It is a ceiling, used under congestion only.
        0.1 leaves convergence unharmed (DLCP, arXiv 2008.08445); with error feedback nothing is lost for good.
    immediate
        Stop at the bound even without congestion, as the paper does.
    error_feedback, rescale
        Send what was lost with the next step; divide sums by how many ranks delivered.
    adaptive_shards
        Ranks behind a congested port add up less.
    collective
        ``direct`` (every rank adds up a shard), ``ring``, ``server`` (a parameter server adds up), or
        ``auto``: whichever of direct and ring suits the size.
    bind
        Address of this rank's UDP socket, ``host:port``. By default the address that leads to the master, and the first
        free DLCP port.
    advertise
        Address where others reach this rank, if not ``bind``.
    server
        Address of the parameter server, ``host:port``.
    job
        Job number, 0 to 65535; what a switch knows a job by.
    token
        Session token; rank 0 draws one if it is 0.
    payload_bytes
        Bytes of a message per packet: 1440 fill an MTU of 1500. 0 finds out what passes on every path, up to an MTU of
        9000. Whatever is chosen is tried with real packets first; if it does not pass, the largest that does is taken.
    congestion, tagged, silence_s, deadline_s
        See :class:`dlcp.transport.TransportOptions`.
    meet_s
        How long the ranks wait for each other when DLCP is enabled.
    fallback
        Go on over the framework's own all-reduce if DLCP cannot be used, at the start or later. Off, it is an error.
    tag_policy
        See :class:`dlcp.tags.TagPolicy`.
    """

    loss_bound: float = 0.1
    immediate: bool = False
    error_feedback: bool = True
    rescale: bool = True
    adaptive_shards: bool = True
    collective: str = "direct"
    bind: str = ""
    advertise: str = ""
    server: str = ""
    job: int = 0
    token: int = 0
    congestion: str = "proportional"
    tagged: bool = True
    payload_bytes: int = 0
    silence_s: float = 10.0
    deadline_s: float = 120.0
    meet_s: float = 30.0
    fallback: bool = True
    tag_policy: TagPolicy = field(default_factory=TagPolicy)

    def __post_init__(self) -> None:
        if self.collective not in COLLECTIVES:
            raise ValueError(f"collective must be one of {', '.join(COLLECTIVES)}, got {self.collective!r}")
        if self.collective == "server" and not self.server:
            raise ValueError("collective 'server' needs the server's address: server='host:port' or DLCP_SERVER")
        if not 0 <= self.job < 1 << 16:
            raise ValueError(f"job must lie in 0..65535, got {self.job}")
        self.bound()
        self.transport(1)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "Options":
        """Return the defaults, overridden by a file and by ``DLCP_*`` variables; see :mod:`dlcp.configuration`.

        Raises
        ------
        ValueError
            A variable or a line does not hold what it should; the message names it.
        """
        return configuration.build(cls, environment)

    def bound(self) -> LossBound:
        """Return the bound on what gradients may lose."""
        return LossBound(self.loss_bound, self.immediate)

    def transport(self, workers: int, topology: Topology | None = None) -> TransportOptions:
        """Return the options of a worker's endpoint, where ``workers`` take part."""
        return TransportOptions(
            flow_weight=flow_weight(self.collective, range(workers), topology),
            payload_bytes=self.payload_bytes or PAYLOAD_UNKNOWN,
            tagged=self.tagged,
            congestion=self.congestion,
            silence_s=self.silence_s,
            deadline_s=self.deadline_s,
        )

    def with_(self, **changes: Any) -> "Options":
        """Return a copy with some fields changed."""
        return replace(self, **changes)
