# SPDX-License-Identifier: Apache-2.0
"""Ways to average gradients or models, each as a user would enable it: PyTorch's own over Gloo, and DLCP's."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

import dlcp.torch
from dlcp.demo.run import JOB
from dlcp.policies.arms import AUTO_PRECISION, FAST, LAG, WARM_UP, Route, bits_allowed, trial_steps
from dlcp.transport.path_mtu import payload_for_mtu
from dlcp.values.planes import FULL_BITS

_BUCKET_MB: Final = 0.5
"""As in the demo: a bucket travels while the next one is computed."""
_ONE_BUCKET_MB: Final = 1e4
"""PyTorch's PowerSGD hook with several buckets deadlocks on Gloo."""
_START: Final = 2
"""Steps before PowerSGD and model averaging begin: the fewest that PyTorch's PowerSGD hook allows."""
_CHOSEN: Final = (AUTO_PRECISION, FAST)
"""The precisions of DLCP with which it chooses what averages each step."""


class Method(ABC):
    """A way to average gradients, or models.

    Attributes
    ----------
    family, amount
        Methods of a family differ only in ``amount``: a rank, a period or a precision. It may be empty.
    first
        Number of steps before it saves bytes, which are counted at their own time.
    period
        Steps from one average of models to the next; 1 if gradients are averaged.
    bucket_mb
        Size of DDP's buckets.
    precision
        Of DLCP's values, ``""`` without DLCP.
    bits
        The numbers of bits that its values may have.
    """

    family: str
    amount = ""
    precision = ""
    bits: tuple[int, ...] = (FULL_BITS,)
    first = 0
    period = 1
    bucket_mb = _BUCKET_MB

    @property
    def name(self) -> str:
        """The name in results and on the command line, such as ``powersgd:4``."""
        return f"{self.family}:{self.amount}" if self.amount else self.family

    @property
    def row(self) -> str:
        """Row of the table, where the best method counts."""
        return self.family

    def trained(self, bits: int) -> "Method":
        """Return the method whose steps count if the lowest precision of values was ``bits``: often itself."""
        return self

    @abstractmethod
    def attach(
        self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, bind: str
    ) -> Callable[[], int] | None:
        """Let a model and its optimizer use this method; ``bind`` is the address of DLCP's socket.

        Returns
        -------
        A function that ends DLCP's session and returns the lowest precision of values in its last steps, in bits. None
        without DLCP.
        """

    def wrap(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer to use."""
        return optimizer


class Gloo(Method):
    """DDP with default settings."""

    family = "gloo"

    def attach(self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, bind: str) -> None:
        """Register nothing."""


def bf16_hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """PyTorch's hook, which it refuses by its name without NCCL, though Gloo supports bfloat16."""
    averaged: torch.futures.Future[torch.Tensor] = bf16_compress_hook(state, bucket)
    return averaged


class HalfHook(Method):
    """PyTorch's hook for 16-bit values."""

    def __init__(self, family: str, hook: Callable[..., Any]) -> None:
        self.family, self._hook = family, hook

    def attach(self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, bind: str) -> None:
        """Register the hook."""
        model.register_comm_hook(None, self._hook)


class PowerSgdHook(Method):
    """PyTorch's PowerSGD hook."""

    family = "powersgd"
    first = _START
    bucket_mb = _ONE_BUCKET_MB

    def __init__(self, rank: int) -> None:
        self.amount = str(rank)

    def attach(self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, bind: str) -> None:
        """Register the hook, with error feedback and warm start."""
        state = PowerSGDState(
            None,
            int(self.amount),
            start_powerSGD_iter=_START,
            use_error_feedback=True,
            warm_start=True,
        )
        model.register_comm_hook(state, powerSGD_hook)


class LocalSgd(Method):
    """PyTorch's post-local SGD: models are averaged once in a period, instead of gradients.

    Parameters
    ----------
    period
        Steps from one average to the next.
    first
        Number of first steps whose gradients are averaged.
    """

    family = "local"

    def __init__(self, period: int, first: int = _START) -> None:
        self.period, self.first = period, first
        self.amount = str(period) if first == _START else f"{period}:{first}"

    def attach(self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, bind: str) -> None:
        """Register the hook that averages gradients until models are averaged."""
        state = PostLocalSGDState(None, None, start_localSGD_iter=self.first, post_local_gradient_allreduce=False)
        model.register_comm_hook(state, post_localSGD_hook)

    def wrap(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return an optimizer that averages models, too."""
        return PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(self.period, warmup_steps=self.first))


def dlcp_options(precision: str, compression: str, bind: str) -> dlcp.torch.Options:
    """Return the options of all methods of DLCP."""
    return dlcp.torch.Options(
        precision=precision,
        compression=compression,
        bind=bind,
        job=JOB,
        payload_bytes=payload_for_mtu(1500),
        shared_memory=False,
        route="auto" if precision in _CHOSEN and not compression else "dlcp",
        fallback=False,  # it would show Gloo's figures as DLCP's
    )


class Dlcp(Method):
    """DLCP with a precision and a compressor."""

    def __init__(self, precision: str = AUTO_PRECISION, compression: str = "") -> None:
        self.precision, self.compression = precision, compression
        self.bits = bits_allowed(precision, error_feedback=True)
        family, _, amount = compression.partition(":")
        self.family = f"dlcp-{family}" if family else "dlcp"
        self.amount = ":".join(filter(None, (amount, "" if precision == AUTO_PRECISION else precision)))
        until_chosen = WARM_UP + trial_steps(len(self.bits) + 1) + LAG
        self.first = until_chosen if precision in _CHOSEN else 0

    @property
    def row(self) -> str:
        """Row of the table: every precision has its own."""
        return self.family if self.compression else self.name

    def trained(self, bits: int) -> Method:
        """Return DLCP with a fixed precision, so that a step does not depend on the network."""
        return Dlcp(str(bits), self.compression) if self.precision in _CHOSEN else self

    def attach(self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, bind: str) -> Callable[[], int]:
        """Enable DLCP."""
        state = dlcp.torch.enable(model, dlcp_options(self.precision, self.compression, bind))

        def end() -> int:
            chooser = state.session.chooser if state.session else None
            by_framework = chooser is not None and chooser.arm.route is Route.FRAMEWORK
            state.close()
            return FULL_BITS if by_framework else state.ledger.latest_bits()

        return end


class DlcpLocalSgd(Method):
    """Local SGD over DLCP, from the first step on, with the default or a given precision."""

    family = "dlcp-local"

    def __init__(self, period: int, precision: str = AUTO_PRECISION) -> None:
        self.period, self.precision = period, precision
        self.bits = bits_allowed(precision, error_feedback=True)
        self.amount = str(period) if precision == AUTO_PRECISION else f"{period}:{precision}"

    def trained(self, bits: int) -> Method:
        """Return it with a fixed precision, so that a step does not depend on the network."""
        return DlcpLocalSgd(self.period, str(bits)) if self.precision == AUTO_PRECISION else self

    def attach(self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, bind: str) -> Callable[[], int]:
        """Average nothing in the backward pass, but the models after steps of the optimizer."""
        model.register_comm_hook(None, dlcp.torch.noop_hook)
        averager = dlcp.torch.LocalSGD(model.module, self.period, dlcp_options(self.precision, "", bind))

        def average(*_: object) -> None:
            averager.step()

        optimizer.register_step_post_hook(average)

        def end() -> int:
            averager.close()
            return averager.traffic.ledger.latest_bits()

        return end


METHODS: Final[dict[str, Method]] = {
    method.name: method
    for method in (
        Gloo(),
        HalfHook("bf16", bf16_hook),
        HalfHook("fp16", fp16_compress_hook),
        *map(PowerSgdHook, (1, 2, 4, 8)),
        *(LocalSgd(period, first) for first in (_START, 0) for period in (4, 8, 16, 32)),
        Dlcp(),
        *(Dlcp(precision) for precision in (FAST, "32", "8", "4")),
        *(Dlcp(compression=f"powersgd:{rank}") for rank in (1, 2, 4, 8)),
        *map(DlcpLocalSgd, (4, 8, 16, 32)),
    )
}
PLAIN: Final = "gloo"
"""The method that others are compared with."""
TRAINED: Final = {method.name: method for each in METHODS.values() for method in map(each.trained, each.bits)}
"""Every method whose steps are counted."""
