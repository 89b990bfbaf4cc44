# SPDX-License-Identifier: Apache-2.0
"""What a user can choose. An argument beats the environment (``DLCP_*``), which beats the default."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from dlcp.tags import TagPolicy
from dlcp.transport import LossBound, TransportOptions


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
        ``direct`` (every rank adds up a shard) or ``server`` (a parameter server does).
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
    congestion, tagged, payload_bytes, silence_s, deadline_s
        See :class:`dlcp.transport.TransportOptions`.
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
    payload_bytes: int = 1440
    silence_s: float = 10.0
    deadline_s: float = 120.0
    tag_policy: TagPolicy = field(default_factory=TagPolicy)

    def __post_init__(self) -> None:
        if self.collective not in ("direct", "server"):
            raise ValueError(f"collective must be 'direct' or 'server', got {self.collective!r}")
        if self.collective == "server" and not self.server:
            raise ValueError("collective 'server' needs the server's address: server='host:port' or DLCP_SERVER")
        if not 0 <= self.job < 1 << 16:
            raise ValueError(f"job must lie in 0..65535, got {self.job}")
        self.bound()
        self.transport(1)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "Options":
        """Return the defaults, overridden by ``DLCP_*`` variables.

        Raises
        ------
        ValueError
            A variable does not hold what it should; the message names it.
        """
        environment = os.environ if environment is None else environment
        chosen: dict[str, object] = {}
        defaults = {entry.name: entry.default for entry in fields(cls)}
        for name, default in defaults.items():
            text = environment.get(f"DLCP_{name.upper()}")
            if text is not None and isinstance(default, (bool, int, float, str)):
                chosen[name] = _parse(f"DLCP_{name.upper()}", text, default)
        return cls(**chosen)  # type: ignore[arg-type]  # _parse keeps the type of each default

    def bound(self) -> LossBound:
        """Return the bound on what gradients may lose."""
        return LossBound(self.loss_bound, self.immediate)

    def transport(self, workers: int) -> TransportOptions:
        """Return the options of a worker's endpoint, where ``workers`` take part."""
        return TransportOptions(
            flow_weight=1 / workers if self.collective == "server" else None,
            payload_bytes=self.payload_bytes,
            tagged=self.tagged,
            congestion=self.congestion,
            silence_s=self.silence_s,
            deadline_s=self.deadline_s,
        )

    def with_(self, **changes: object) -> "Options":
        """Return a copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


def _parse(name: str, text: str, default: bool | int | float | str) -> bool | int | float | str:
    try:
        if isinstance(default, bool):
            return {"1": True, "true": True, "0": False, "false": False}[text.lower()]
        return type(default)(text, 0) if isinstance(default, int) else type(default)(text)
    except (KeyError, ValueError):
        kind = "1 or 0" if isinstance(default, bool) else type(default).__name__
        raise ValueError(f"{name} must be {kind}, got {text!r}") from None
