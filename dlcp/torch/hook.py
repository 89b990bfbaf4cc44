# SPDX-License-Identifier: Apache-2.0
"""The DDP communication hook: buckets of gradients are sent while backward still runs. FSDP2 has its own module."""

import hashlib
import logging
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket  # torch.distributed has it too, but without types
from torch.autograd import profiler
from torch.nn.parallel import DistributedDataParallel

from dlcp.session.options import Options
from dlcp.torch.framework import profiled
from dlcp.torch.state import VALUE_TYPES, State, TensorFuture

log = logging.getLogger("dlcp")


def hook(state: State, bucket: GradBucket) -> TensorFuture:
    """Average a bucket with DLCP; registered by :func:`enable`.

    If that fails, ``backward`` raises a RuntimeError that quotes the :class:`dlcp.transport.TransportError`: DDP cannot
    handle an error set on a future, only one raised by a callback.
    """
    with profiled("hand over a bucket") if profiler._is_profiler_enabled else nullcontext():
        return state.average_bucket(bucket).then(lambda averaged: averaged.value())


def noop_hook(state: object, bucket: GradBucket) -> TensorFuture:
    """Leave every rank its own gradients; shows the step time with free communication."""
    unchanged: TensorFuture = torch.futures.Future()
    unchanged.set_result(bucket.buffer())
    return unchanged


def enable(model: torch.nn.Module, options: Options | None = None, *, state: State | None = None) -> State:
    """Let DLCP average the gradients of a DDP or FSDP2 model; all ranks must call it, before the first backward.

    Parameters
    ----------
    model
        A DistributedDataParallel model on the CPU or on one CUDA device, or one sharded by ``fully_shard``: then DLCP
        reduces and scatters gradients, and parameters are gathered as before.
    options
        By default ``Options()``.
    state
        A state from a checkpoint, to continue from; ``options`` replace its own if given.

    Returns
    -------
    The state; call its ``close`` after training.

    Raises
    ------
    TypeError
        The model is neither.
    RuntimeError
        DLCP or another communication hook already averages the model's gradients.
    ValueError
        A parameter's type or device is not supported, or it has sparse gradients, or FSDP2 does not support an option;
        the message names it.
    NotJoinedError
        Not all ranks can use DLCP, and ``options.fallback`` is off. With it all of them train as without DLCP.
    """
    if isinstance(model, DistributedDataParallel):
        refuse_second_hook(model)
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    refuse_sparse(plain)
    refuse_types(plain)
    if state is None:
        state = State(options or Options())
    elif options is not None:
        state.options = options
        state.tagger.policy = options.classes()
        state.ledger.job = options.job
    if "torch.distributed.tensor" in sys.modules:  # otherwise no tensor parallelism is in use
        from dlcp.torch.tensor_parallel import keep_copies_equal  # most jobs do not need it

        state.options = keep_copies_equal(model, state.options)
    if isinstance(model, DistributedDataParallel):
        state.attach(model)
        model.register_comm_hook(state, hook)
        _announce(plain, state)
        return state
    from dlcp.torch import fsdp  # most jobs do not need it

    if not fsdp.is_sharded(model):
        raise TypeError(f"enable takes a DistributedDataParallel or fully_shard model, got {type(model).__name__}")
    fsdp.attach(state, model)
    _announce(plain, state)
    return state


def _announce(model: torch.nn.Module, state: State) -> None:
    """Log once, on the first rank, how DLCP averages a model; print it if the script has not set logging up.

    Nobody would see a line of level INFO otherwise, nor that the lines in the script have an effect.
    """
    if state.reason or not state.group_ranks or state.group_ranks[0] != dist.get_rank():
        return
    parameters = sum(parameter.numel() for parameter in model.parameters())
    options, ranks = state.options, len(state.group_ranks)
    text = (
        f"averages the gradients of {type(model).__name__} ({parameters:,} parameters) over {ranks} ranks: "
        f"loss bound {options.loss_bound:.0%}, precision {options.precision}, route {options.route}"
    )
    if log.hasHandlers():
        log.info("DLCP %s", text)
    else:
        print(f"dlcp: {text}", file=sys.stderr, flush=True)


def refuse_second_hook(model: DistributedDataParallel) -> None:
    """Raise RuntimeError if a model has a communication hook: DDP takes one, and says so after ranks have met."""
    for _, state in model._comm_hooks:
        if not isinstance(state, State):
            raise RuntimeError("the model already has another communication hook, and DDP takes only one")
        if state.attached:
            raise RuntimeError(
                "DLCP already averages the gradients of this model: use the state that enable() returned, once"
            )
        raise RuntimeError(
            "DLCP has averaged the gradients of this model, and its state is closed: call attach(model) of that state"
        )


def refuse_types(model: torch.nn.Module) -> None:
    """Raise ValueError if a parameter's type or device is not supported."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (
            parameter.dtype not in VALUE_TYPES or parameter.device.type not in ("cpu", "cuda")
        ):
            raise ValueError(
                f"parameter {name} is {parameter.dtype} on {parameter.device}; this version of DLCP exchanges "
                f"{', '.join(kind.value for kind in VALUE_TYPES.values())} on the CPU and on CUDA"
            )


def refuse_sparse(model: torch.nn.Module) -> None:
    """Raise ValueError if a model has sparse gradients, which DDP's buckets cannot hold; detected as DDP does."""
    for name, module in model.named_modules():
        kinds = torch.nn.Embedding, torch.nn.EmbeddingBag
        if isinstance(module, kinds) and module.sparse and module.weight.requires_grad:
            weight = f"{name}.weight".removeprefix(".")
            raise ValueError(
                f"parameter {weight} has sparse gradients (sparse=True), and DLCP only exchanges dense ones: set "
                "sparse=False, or leave the gradients of this model to the framework"
            )


def parameter_digest(model: torch.nn.Module) -> str:
    """Return the SHA-256 of all parameters' bits, in order of definition."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def replicas_identical(model: torch.nn.Module, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether all ranks hold bitwise equal parameters; all ranks must call it."""
    digests: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(digests, parameter_digest(model), group=group)
    return len(set(digests)) == 1
