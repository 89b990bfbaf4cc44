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
from dlcp.torch.state import VALUE_TYPES, State, TensorFuture, joining_unsupported

log = logging.getLogger("dlcp")


def hook(state: State, bucket: GradBucket, *more: object) -> TensorFuture:
    """Average a bucket with DLCP; registered by :func:`enable`.

    Anything but a bucket, as other wrappers pass to their hooks, raises TypeError. If averaging fails, ``backward``
    raises a RuntimeError that quotes the :class:`dlcp.transport.TransportError`: DDP cannot handle an error set on a
    future, only one raised by a callback.
    """
    if more or not hasattr(bucket, "is_last"):
        raise TypeError(
            f"DLCP's hook averages buckets of DistributedDataParallel, and was called with {type(bucket).__name__}: "
            "call dlcp.torch.enable(model), which says what it supports, instead of registering the hook"
        )
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
        A parameter's type or device is not supported, or it has sparse gradients, or an option of
        DistributedDataParallel or FSDP2 is not supported; the message names it.
    NotJoinedError
        Not all ranks can use DLCP, and ``options.fallback`` is off. With it all of them train as without DLCP.
    """
    if isinstance(model, DistributedDataParallel):
        if why := unsupported(model):
            raise ValueError(why)
        refuse_second_hook(model)
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    if why := sparse_parameter(plain):
        raise ValueError(why)
    refuse_types(plain)
    if state is None:
        state = State(options or Options())
    elif options is not None:
        state.options = options
        state.tagger.policy = options.tag_policy
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

    Otherwise nobody would see a line of level INFO, or notice that the lines in the script have an effect.
    """
    if state.reason or not state.group_ranks or state.group_ranks[0] != dist.get_rank():
        return
    parameters = sum(parameter.numel() for parameter in model.parameters())
    options, ranks = state.options, len(state.group_ranks)
    text = (
        f"averages the gradients of {type(model).__name__} ({parameters:,} parameters) over {ranks} ranks: "
        f"loss bound {options.describe_bounds()}, precision {options.precision}, route {options.route}"
    )
    if log.hasHandlers():
        log.info("DLCP %s", text)
    else:
        print(f"dlcp: {text}", file=sys.stderr, flush=True)


def unsupported(model: DistributedDataParallel) -> str:
    """Return why DDP averages a model's gradients without a communication hook or with one of its own; else ``""``.

    The reason names the option, and what to do.
    """

    def given(name: str) -> bool:
        return bool(getattr(model, name, None))  # no version of PyTorch has all of them

    if given("_use_python_reducer"):
        return (
            'torch._dynamo.config.optimize_ddp="python_reducer" gives hooks single gradients and ignores their '
            'averages: set it to "ddp_optimizer", the default, before DistributedDataParallel wraps the model'
        )
    if given("mixed_precision"):
        return (
            "DistributedDataParallel(mixed_precision=...) averages with a communication hook of its own, and DDP takes "
            "only one: use torch.autocast instead"
        )
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in model.module.parameters()):
        return (
            "_apply_optimizer_in_backward makes DDP average with a communication hook of its own, and DDP takes only "
            "one: step the optimizer after backward"
        )
    if given("_delay_all_reduce_all_params"):
        return (
            "DistributedDataParallel(delay_all_reduce_named_params=...) with all parameters has no buckets to average: "
            "leave out some parameters, or the option"
        )
    if given("skip_all_reduce_unused_params"):
        return (
            "DistributedDataParallel(skip_all_reduce_unused_params=True) leaves buckets out of steps, and DLCP needs "
            "all of them: omit the option"
        )
    return joining_unsupported(model)


def refuse_second_hook(model: DistributedDataParallel) -> None:
    """Raise RuntimeError if a model has a communication hook, which DDP itself would do only after ranks have met."""
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


def sparse_parameter(model: torch.nn.Module) -> str:
    """Return what is wrong with a model that has sparse gradients, which DDP's buckets cannot hold; else ``""``.

    It is detected as DDP does.
    """
    for name, module in model.named_modules():
        kinds = torch.nn.Embedding, torch.nn.EmbeddingBag
        if isinstance(module, kinds) and module.sparse and module.weight.requires_grad:
            weight = f"{name}.weight".removeprefix(".")
            return (
                f"parameter {weight} has sparse gradients (sparse=True), and DLCP only exchanges dense ones: set "
                "sparse=False, or leave the gradients of this model to the framework"
            )
    return ""


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
