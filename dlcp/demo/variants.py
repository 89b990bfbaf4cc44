# SPDX-License-Identifier: Apache-2.0
"""The demo's comparison: one setup for all runs, and variants that average gradients in different ways."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from dlcp.demo.background import BURST_S, BackgroundBurst, schedule
from dlcp.inputs.configuration import LOSS_BOUND
from dlcp.policies.arms import AUTO_PRECISION, HALF_PRECISION
from dlcp.values.planes import FULL_BITS
from dlcp.wire import UDP_PORT_BASE, UDP_PORT_COUNT

BACKGROUND_FLOWS: Final = 2
OPTIMIZERS: Final = ("adamw", "sgd")
RUN_DEADLINE_S: Final = 600.0
_ORDINARY_PORT: Final = UDP_PORT_BASE + UDP_PORT_COUNT
"""The first UDP port above those that switches treat as DLCP."""


@dataclass(frozen=True, slots=True)
class DemoSetup:
    """Settings common to all runs of a demo.

    Parameters
    ----------
    fp16
        Send 16 bits of each value: Gloo with PyTorch's own hook, the others with DLCP's precision.
    optimizer
        One of :data:`OPTIMIZERS`.
    burst_s
        Mean length of a background burst.

    Raises
    ------
    ValueError
        Unknown optimizer, no positive burst length, or ``fp16`` with a parameter server or another precision.
    """

    seed: int = 1
    workers: int = 4
    steps: int = 24
    rate_bps: int = 32_000_000
    depth_packets: int = 32
    loss_bound: float = LOSS_BOUND
    precision: str = AUTO_PRECISION
    collective: str = "direct"
    fp16: bool = False
    optimizer: str = "adamw"
    burst_s: float = BURST_S

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}")
        if not self.burst_s > 0:
            raise ValueError(f"the length of background bursts must be above 0 seconds, got {self.burst_s:g}")
        if self.fp16 and self.server is not None:
            raise ValueError("Gloo's parameter server sends 32 bits: use fp16 with the direct collective")
        if self.fp16 and self.precision not in (AUTO_PRECISION, HALF_PRECISION):
            raise ValueError(f"fp16 contradicts precision {self.precision}: omit one of the two")

    @property
    def command(self) -> str:
        """The command that repeats the runs."""
        collective = "ps" if self.server is not None else self.collective
        return (
            f"dlcp demo --seed {self.seed} --collective {collective} --steps {self.steps} "
            f"--rate-mbps {self.rate_bps / 1e6:g} --depth {self.depth_packets} --loss-bound {self.loss_bound:g} "
            f"--precision {self.precision} --optimizer {self.optimizer} "
            f"--burst-seconds {self.burst_s:g}{' --fp16' if self.fp16 else ''}"
        )

    @property
    def server(self) -> int | None:
        """The host of the parameter server, if there is one."""
        return self.workers if self.collective == "server" else None

    @property
    def targets(self) -> list[int]:
        """The hosts of the training, which background traffic is sent to."""
        return list(range(self.workers + (self.server is not None)))

    @property
    def sources(self) -> list[int]:
        """The hosts that send background traffic."""
        first = len(self.targets)
        return list(range(first, first + BACKGROUND_FLOWS))

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return self.sources[-1] + 1

    def fair_share(self, host: int) -> float:
        """Return the job's fair share of a host's port: its flows divided by all flows.

        Over TCP the training has one flow from each worker into the server's port, and one flow into any other port,
        because Gloo sums around a ring.
        """
        flows = self.workers if host == self.server else 1
        return flows / (flows + BACKGROUND_FLOWS)

    def background_share(self, bursts: Sequence[BackgroundBurst], stop_s: float) -> float:
        """Return the background's fair share of a port, as the mean over all bursts up to ``stop_s``."""
        lasted = [(max(0.0, min(burst.stop_s, stop_s) - burst.start_s), burst.target) for burst in bursts]
        on_s = sum(seconds for seconds, _ in lasted)
        return sum(seconds * (1 - self.fair_share(target)) for seconds, target in lasted) / on_s if on_s else 0.0

    def bursts(self) -> list[BackgroundBurst]:
        """Return the bursts of the background, which are the same in every run."""
        return schedule(self.seed, len(self.targets), RUN_DEADLINE_S, on_s=self.burst_s)


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to average gradients.

    Parameters
    ----------
    held
        Whether switches limit the job to its fair share.
    environment
        Variables that set :class:`dlcp.torch.Options`.
    """

    name: str
    title: str
    mode: str
    held: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    udp_port: int = UDP_PORT_BASE


def variants(setup: DemoSetup) -> list[Variant]:
    """Return the variants that the demo compares."""
    bound = {
        "DLCP_LOSS_BOUND": str(setup.loss_bound),
        "DLCP_PRECISION": HALF_PRECISION if setup.fp16 else setup.precision,
    }
    plain = {
        "DLCP_LOSS_BOUND": "0",
        "DLCP_TAGGED": "0",
        "DLCP_CONGESTION": "cubic",
        "DLCP_PRECISION": HALF_PRECISION if setup.fp16 else str(FULL_BITS),
    }
    hook = ", with PyTorch's fp16 hook" if setup.fp16 else ""
    return [
        Variant("gloo", f"Gloo over the kernel's TCP (CUBIC){hook}", "gloo"),
        Variant("plain", "DLCP's transport alone: reliable, one queue, no tags", "dlcp", False, plain, _ORDINARY_PORT),
        Variant("dlcp", "DLCP, held to its fair share", "dlcp", True, bound),
        Variant("dlcp_priority", "DLCP, with priority over the background", "dlcp", False, bound),
    ]
