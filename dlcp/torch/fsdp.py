# SPDX-License-Identifier: Apache-2.0
"""FSDP2 (``fully_shard``): gradients are reduced and scattered over DLCP; parameters are gathered as before.

FSDP2 lets its reduce-scatter be replaced, one parameter group at a time, and waits for each. A group is a bucket whose
shards are what each rank keeps. It is copied to host memory in which every shard begins with a new packet. Lost and
rounded-off values are residual of the parameter, wherever its shards are, and go into the next step.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule

from dlcp.collectives import Bucket
from dlcp.collectives.choice import AUTO, DIRECT
from dlcp.inputs.configuration import Trait
from dlcp.policies.arms import Route
from dlcp.session.averager import PendingBucket
from dlcp.session.options import Options
from dlcp.session.training_session import DEADLINE_FACTOR, Fallback
from dlcp.torch.framework import framework_route, scale_of
from dlcp.torch.state import VALUE_TYPES, State, as_array
from dlcp.transport import DeadlineError
from dlcp.values.tags import Layer, Segment, layers_in_order

try:
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
except ImportError:
    raise ImportError(
        f"DLCP requires PyTorch 2.9 or newer, and this is {torch.__version__}: pip install --upgrade torch"
    ) from None

Reduce = Callable[[], object]
"""Performs FSDP2's own reduce-scatter."""
ZEROTH: Final = 0
"""The dimension along which parameters are sharded: only with this one is a shard contiguous in the parameter."""


class ShardedParameter(NamedTuple):
    """A parameter of a group: its layer, and the values of it in each rank's shard, including padding."""

    layer: Layer
    shard_values: int


class ShardLayout(NamedTuple):
    """Layout of a group on the host, in values: each rank's ``shard``, padded to ``padded``; and its layers."""

    shard: int
    padded: int
    segments: Sequence[Segment]

    @classmethod
    def of(cls, parameters: Sequence[ShardedParameter], ranks: int, values_per_packet: int) -> "ShardLayout":
        """Lay out a group so that each rank's shard begins with a packet."""
        shard = sum(each.shard_values for each in parameters)
        padded = -(-shard // values_per_packet) * values_per_packet
        segments: list[Segment] = []
        for rank in range(ranks):
            start = rank * padded
            for layer, count in parameters:
                segments.append(Segment(layer, start, start + count, rank * count))
                start += count
            last = segments[-1]
            segments[-1] = Segment(last.layer, last.start, (rank + 1) * padded, last.offset)
        return cls(shard, padded, tuple(segments))


class LossyReduceScatter(ReduceScatter):
    """The reduce-scatter of one parameter group.

    Parameters
    ----------
    gradients
        The state that a model's groups share.
    parameters
        Parameters of the group, in FSDP2's order.
    framework
        FSDP2's own reduce-scatter.
    """

    def __init__(
        self, gradients: "ShardedGradients", parameters: Sequence[ShardedParameter], framework: ReduceScatter
    ) -> None:
        self.gradients, self.parameters, self.framework = gradients, parameters, framework
        self._layouts: dict[tuple[int, int], tuple[ShardLayout, bool]] = {}

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate memory for FSDP2's gradients or its shard."""
        return self.framework.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce a flat tensor over all ranks, and give each rank its shard of it; done when this returns."""
        by_framework = partial(self.framework, output_tensor, input_tensor, group, op)
        self.gradients.reduce_scatter(self, output_tensor, input_tensor, op, by_framework)

    def layout(self, values: int, ranks: int, values_per_packet: int) -> tuple[ShardLayout, bool]:
        """Return a tensor's layout on the host, and whether it has all parameters of the group.

        FSDP2 omits parameters that a step has not used, and does not say which.
        """
        found = self._layouts.get((values, values_per_packet))
        if found is None:
            whole = values == ranks * sum(each.shard_values for each in self.parameters)
            first = self.parameters[0].layer
            parts = [ShardedParameter(Layer(f"part of {first.name} and others", first.position), values // ranks)]
            layout = ShardLayout.of(self.parameters if whole else parts, ranks, values_per_packet)
            found = self._layouts[values, values_per_packet] = layout, whole
        return found


class ShardedGradients:
    """State that a model's parameter groups share: the DLCP state, the step's buckets, and host memory."""

    def __init__(self, state: State, ranks: int) -> None:
        self._state, self._ranks = state, ranks
        self._sequence = 0
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def in_use(self) -> bool:
        """Whether the DLCP state is still open."""
        return self._state.attached

    def reduce_scatter(
        self, group: LossyReduceScatter, output: torch.Tensor, tensor: torch.Tensor, op: Any, by_framework: Reduce
    ) -> None:
        """Reduce a group's gradients; see :class:`LossyReduceScatter`.

        Raises
        ------
        RuntimeError
            The state is closed, or the operation or format is not one for gradients.
        TransportError
            It failed; the message says where.
        """
        session = self._state.session
        if session is None or not self._state.attached:
            raise RuntimeError("the DLCP state is closed: FSDP2 cannot continue with it")
        if tensor.dtype not in VALUE_TYPES:
            raise RuntimeError(f"gradients are reduced as {tensor.dtype}; set another reduce_dtype")
        if self._sequence == 0:
            Variable._execution_engine.queue_callback(self._end_step)
        step, sequence = self._state.step, self._sequence
        self._sequence += 1
        if session.endpoint is None or session.route_of(step) is Route.FRAMEWORK:
            layout, _ = group.layout(tensor.numel(), self._ranks, 1)
            pending = PendingBucket(step, sequence, layout.segments, tensor.nbytes, None)
            session.admit(pending)
            self._by_framework(tensor, layout, by_framework)
            session.settle(pending)
            return
        per_packet = session.endpoint.connection.options.payload_bytes // tensor.element_size()
        layout, whole = group.layout(tensor.numel(), self._ranks, per_packet)
        host = self._to_host(tensor, layout)
        factor = factor_of(op, self._ranks)
        bucket = Bucket(*as_array(host.view(-1)), layout.segments, exact=not whole, scattered=True, factor=factor)
        limit_s = DEADLINE_FACTOR * session.options.deadline_s
        try:
            session.average(step, session.averager.first_sequence + sequence, bucket).result(limit_s)
        except FutureTimeoutError:
            layers = bucket.label(0, len(bucket.values))
            raise DeadlineError(
                f"step {step}: rank {session.rank} has waited {limit_s:g} s for the sum of {layers}"
            ) from None
        output.copy_(host[session.rank, : layout.shard])

    def _to_host(self, tensor: torch.Tensor, layout: ShardLayout) -> torch.Tensor:
        """Return a copy of a tensor on the host, a row for each rank's shard; the last one is overwritten."""
        size = self._ranks * layout.padded * tensor.element_size()
        if self._memory.numel() < size:
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=tensor.is_cuda)
        host = self._memory[:size].view(tensor.dtype).view(self._ranks, layout.padded)
        host[:, : layout.shard] = tensor.view(self._ranks, layout.shard)
        host[:, layout.shard :] = 0
        return host

    def _by_framework(self, tensor: torch.Tensor, layout: ShardLayout, by_framework: Reduce) -> None:
        """Let FSDP2 reduce by itself; a checkpoint's pending residual is added, for the last time."""
        feedback = self._state.feedback
        if feedback.size:
            host = self._to_host(tensor, layout)
            values, value_type = as_array(host.view(-1))
            feedback.apply(values, layout.segments, value_type)
            tensor.view(self._ranks, layout.shard).copy_(host[:, : layout.shard])
        by_framework()

    def _end_step(self) -> None:
        self._state.end_step()
        self._sequence = 0


def factor_of(op: Any, ranks: int) -> float:
    """Return the factor that turns an average into the requested operation's result.

    Raises
    ------
    RuntimeError
        It is neither average nor sum.
    """
    kind = getattr(op, "op", op)
    if kind == dist.ReduceOp.AVG:
        return 1.0
    if kind == dist.ReduceOp.SUM:
        return float(ranks)
    if kind == dist.ReduceOp.PREMUL_SUM:
        return ranks * float(scale_of(op))
    raise RuntimeError(f"gradients are averaged or summed, not reduced by {op}")


def is_sharded(model: torch.nn.Module) -> bool:
    """Return whether FSDP2 shards parameters of a model."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def attach(state: State, model: torch.nn.Module) -> None:
    """Join the other ranks, and replace the reduce-scatter of all parameter groups; all ranks must call it.

    Raises
    ------
    ValueError
        The options or the model are not supported; the message says what.
    NotJoinedError
        Not all ranks can use DLCP, and the options do not allow a fallback.
    """
    state.check_unattached()
    _check_options(state.options)
    _refuse_second(model)
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = {id(group): (module, group) for module in modules for group in groups_of(module)}
    named = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in named.items()}
    layers = layers_in_order(list(named), {name: tuple(parameter.shape) for name, parameter in named.items()})
    process_groups = [_process_group(group, names) for _, group in groups.values()]
    ranks = {tuple(dist.get_process_group_ranks(each)) for each in process_groups}
    if len(ranks) != 1:
        raise ValueError(f"parameters are sharded over different ranks, {sorted(ranks)}: DLCP supports one such group")

    options = state.options.with_(collective=DIRECT)
    route = framework_route(process_groups[0], next(iter(named.values())).device)
    session = state.join(
        process_groups[0],
        lambda _: Fallback("FSDP2's own reduce-scatter", route=route),
        options,
        call="dlcp.torch.enable",
    )
    state.attached = True
    if session is None:
        return
    gradients = ShardedGradients(state, len(session.membership.ranks))
    for module, group in groups.values():
        parts = _parameters_of(group, names, layers)
        if parts:
            module.set_custom_reduce_scatter(LossyReduceScatter(gradients, parts, _by_itself(group)))


def _by_itself(group: Any) -> ReduceScatter:
    """Return a parameter group's own reduce-scatter, without DLCP."""
    found: ReduceScatter = group._reduce_scatter_comm
    return found.framework if isinstance(found, LossyReduceScatter) else found


def _refuse_second(model: torch.nn.Module) -> None:
    """Raise RuntimeError if an open state already reduces the model's gradients."""
    for module in model.modules():
        for group in groups_of(module) if isinstance(module, FSDPModule) else ():
            now = group._reduce_scatter_comm
            if isinstance(now, LossyReduceScatter) and now.gradients.in_use:
                raise RuntimeError(
                    "DLCP already reduces the gradients of this model: use the state that enable() returned, once, or "
                    "close() it first"
                )


def _check_options(options: Options) -> None:
    names = options.given(Trait.WHOLE_STEP)
    if options.collective not in (AUTO, DIRECT):
        names.append("collective")
    if names:
        raise ValueError(f"FSDP2 does not support {', '.join(names)}: leave that out, or use DDP")


def groups_of(module: FSDPModule) -> Sequence[Any]:
    """Return a module's parameter groups, which PyTorch does not expose; none without parameters of its own."""
    state: Any = module._get_fsdp_state()
    groups: Sequence[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before PyTorch 2.13
        return [state._fsdp_param_group] if state._fsdp_param_group else []
    return groups


def _process_group(group: Any, names: Mapping[int, str]) -> dist.ProcessGroup:
    """Return the ranks among which a parameter group is sharded.

    Raises
    ------
    ValueError
        It is not sharded, or not along the first dimension.
    """
    for each in group.fsdp_params:
        name = names[id(_parameter(each))]
        if not hasattr(each.mesh_info, "shard_process_group"):
            raise ValueError(f"parameter {name} is replicated, not sharded: use DDP")
        if each.fsdp_placement.dim != ZEROTH:
            raise ValueError(
                f"parameter {name} is sharded along dimension {each.fsdp_placement.dim}; DLCP can place lost values "
                "along dimension 0 only: leave shard_placement_fn out"
            )
    found: dist.ProcessGroup = group._reduce_scatter_process_group
    return found


def _parameters_of(group: Any, names: Mapping[int, str], layers: Mapping[str, Layer]) -> list[ShardedParameter]:
    """Return the trained parameters of a group, in FSDP2's order."""
    return [
        ShardedParameter(layers[names[id(_parameter(each))]], each.padded_sharded_param_size.numel())
        for each in group.fsdp_params
        if _parameter(each).requires_grad
    ]


def _parameter(sharded: Any) -> torch.Tensor:
    """Return the model's current parameter: loading a checkpoint may have replaced it."""
    found: torch.Tensor = getattr(sharded._module_info.module, sharded._module_info.param_name)
    return found
