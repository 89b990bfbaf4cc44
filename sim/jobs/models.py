# SPDX-License-Identifier: Apache-2.0
"""Computing times of a worker, layer by layer: from published throughput, or measured on a PyTorch model.

``models.yaml`` has the layers of published models, and the throughput of GPUs on them, each with its source.
"""

import dataclasses
import importlib
import logging
import re
import statistics
import sys
import sysconfig
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
import yaml
from msgspec import Meta

from dlcp.inputs.document import Document
from dlcp.inputs.error_text import describe, nearest
from dlcp.sim.limits import (
    SIZE_BYTES_MAX,
    VALUES_MAX,
    BytesOrNone,
    LimitError,
    Seconds,
    SimulatorError,
    available_bytes,
)

log = logging.getLogger("dlcp")


class ModelLayer(msgspec.Struct, frozen=True, array_like=True):
    """Parameters whose gradients become ready together.

    Parameters
    ----------
    parameters
        Number of values.
    macs
        Multiply-accumulate operations of the forward pass, for one sample (an image, a sequence, or a token).
    outputs
        Values of one sample that later layers need from this layer and earlier ones; 0 if unknown.
    """

    name: str
    parameters: int
    macs: int
    outputs: int = 0


class ModelBlock(msgspec.Struct, frozen=True):
    """Layers that are repeated, as ``layer0.NAME``, ``layer1.NAME`` and so on."""

    times: int
    layers: tuple[ModelLayer, ...]


class ModelArchitecture(msgspec.Struct, frozen=True):
    """A model as its authors describe it; layers from the input to the output.

    Parameters
    ----------
    sample
        Unit of the batch size.
    source
        Publication that describes the architecture.
    block, last
        The layers that follow the first ones; in `MODELS` they are already part of ``layers``.
    extends, after
        The model that this one extends, and the layer of it that this one's own layers follow.
    """

    layers: tuple[ModelLayer, ...]
    sample: Literal["image", "sequence", "token"]
    source: str
    block: ModelBlock | None = None
    last: tuple[ModelLayer, ...] = ()
    extends: str = ""
    after: str = ""

    @property
    def parameters(self) -> int:
        """Return the number of trained values."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def macs(self) -> int:
        """Return the multiply-accumulate operations of a sample's forward pass."""
        return sum(layer.macs for layer in self.layers)


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """A published throughput.

    Parameters
    ----------
    precision
        ``single`` (TF32 on an A100) or ``mixed``.
    batch
        Samples per GPU and step.
    samples_per_s
        Throughput of a single GPU; 0 if ``flops_per_s`` is given.
    flops_per_s
        Achieved model floating-point operations per second (not the peak).
    """

    model: str
    gpu: str
    precision: Literal["single", "mixed"]
    batch: int
    source: str
    samples_per_s: float = 0.0
    flops_per_s: float = 0.0


class _Published(msgspec.Struct, frozen=True):
    models: dict[str, ModelArchitecture]
    throughputs: tuple[Throughput, ...]
    tasks: dict[str, tuple[ModelLayer, ...]]


def _whole(model: ModelArchitecture, models: Mapping[str, ModelArchitecture]) -> ModelArchitecture:
    """Return a model with the layers of its blocks, and of the one that it extends."""
    if model.block:
        repeated = (
            msgspec.structs.replace(layer, name=f"layer{number}.{layer.name}")
            for number in range(model.block.times)
            for layer in model.block.layers
        )
        return msgspec.structs.replace(model, layers=(*model.layers, *repeated, *model.last))
    if not model.extends:
        return model
    others = models[model.extends].layers
    place = [layer.name for layer in others].index(model.after) + 1
    return msgspec.structs.replace(model, layers=(*others[:place], *model.layers, *others[place:]))


_PUBLISHED: Final = msgspec.yaml.decode(Path(__file__).with_name("models.yaml").read_bytes(), type=_Published)
MODELS: Final = {name: _whole(model, _PUBLISHED.models) for name, model in _PUBLISHED.models.items()}
THROUGHPUTS: Final = _PUBLISHED.throughputs
TASK_LAYERS: Final = _PUBLISHED.tasks
"""The networks that jobs with ``learn`` train, by task; layers from the input to the output."""
VALUE_BYTES: Final = 4
"""Bytes of a parameter, a gradient and an activation in single precision."""
BACKWARD_OVER_FORWARD: Final = 2.0
"""The backward pass has two matrix products for each one of the forward pass: for the gradients of the inputs and of
the weights (Narayanan et al., SC 2021, arXiv 2104.04473, appendix)."""


def architecture(name: str) -> ModelArchitecture:
    """Return a model by name.

    Raises
    ------
    ValueError
        The model is unknown.
    """
    if name not in MODELS:
        sizes = "; a size is written as 350MB or 16MiB" if name[:1].isdigit() else ""
        raise ValueError(f"there is no model {name!r}{nearest(name, MODELS)}{sizes}")
    return MODELS[name]


@dataclass(frozen=True, slots=True)
class TimedLayer:
    """A layer's parameters, and the times of its forward and backward pass for a whole batch.

    Parameters
    ----------
    output_bytes
        Bytes that later layers need from this layer and earlier ones, for a whole batch; 0 if unknown, or if the model
        cannot be cut here.
    """

    name: str
    parameters: Annotated[int, Meta(ge=0, le=VALUES_MAX)]
    forward_s: Seconds
    backward_s: Seconds
    output_bytes: BytesOrNone = 0


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Computing times of a worker in one step; layers from the input to the output.

    Parameters
    ----------
    batch
        Samples per worker and step.
    source
        Source of the times.
    """

    name: str
    layers: Annotated[tuple[TimedLayer, ...], Meta(min_length=1)]
    batch: Annotated[int, Meta(ge=1, le=VALUES_MAX)]
    source: str

    @property
    def parameters(self) -> int:
        """Return the number of trained values."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def compute_s(self) -> float:
        """Return the computing time of a step on one worker."""
        return sum(layer.forward_s + layer.backward_s for layer in self.layers)


def step_profile(name: str, gpu: str, precision: str = "mixed", batch: int | None = None) -> StepProfile:
    """Return the step profile of a model on a GPU.

    The forward pass takes a third of the step. A layer's share of a pass is its share of the multiplications, which
    underestimates memory-bound layers; these take little of a step in these models.

    Parameters
    ----------
    batch
        Samples per worker and step; None takes the published batch. Time is proportional to it.

    Raises
    ------
    ValueError
        No throughput is published for that model on that GPU; the message lists the known ones.
    """
    model = architecture(name)
    entries = [entry for entry in THROUGHPUTS if entry.model == name]
    for entry in entries:
        if (entry.gpu, entry.precision) == (gpu, precision):
            samples = batch or entry.batch
            rate = entry.samples_per_s or entry.flops_per_s / (2 * model.macs * (1 + BACKWARD_OVER_FORWARD))
            return StepProfile(name, _timed(model.layers, samples / rate, samples), samples, entry.source)
    known = ", ".join(f"{entry.gpu} {entry.precision}" for entry in entries)
    raise ValueError(f"no published throughput of {name} on {gpu} in {precision} precision; choose from: {known}")


def task_profile(task: str, compute_s: float, batch: int, scale: int = 1) -> StepProfile:
    """Return the step profile of a task's network with ``scale`` times as many values and steps of ``compute_s``."""
    layers = [ModelLayer(layer.name, scale * layer.parameters, layer.macs) for layer in TASK_LAYERS[task]]
    return StepProfile(task, _timed(layers, compute_s, batch), batch, "compute_s of the experiment")


def _timed(layers: Sequence[ModelLayer], step_s: float, batch: int) -> tuple[TimedLayer, ...]:
    """Divide the time of a step among layers by their multiplications."""
    forward_s, macs = step_s / (1 + BACKWARD_OVER_FORWARD), sum(layer.macs for layer in layers)
    shares = [(layer, forward_s * layer.macs / macs) for layer in layers]
    return tuple(
        TimedLayer(
            layer.name,
            layer.parameters,
            seconds,
            seconds * BACKWARD_OVER_FORWARD,
            batch * layer.outputs * VALUE_BYTES,
        )
        for layer, seconds in shares
    )


def joined_layers(profile: StepProfile, parameters: int) -> StepProfile:
    """Join adjacent layers until each group has ``parameters`` or more, at least one; the last may have fewer."""
    groups: list[list[TimedLayer]] = [[]]
    for layer in profile.layers:
        if layer.parameters and sum(each.parameters for each in groups[-1]) >= max(1, parameters):
            groups.append([])
        groups[-1].append(layer)
    joined = tuple(
        TimedLayer(
            "+".join(layer.name for layer in group),
            sum(layer.parameters for layer in group),
            sum(layer.forward_s for layer in group),
            sum(layer.backward_s for layer in group),
            group[-1].output_bytes,
        )
        for group in groups
    )
    return dataclasses.replace(profile, layers=joined)


_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kKMGT])(i?))?B")


def parse_size(text: str) -> int:
    """Return a size such as ``350MB`` or ``1MiB`` in bytes; 0 if the text is none.

    Raises
    ------
    dlcp.sim.limits.LimitError
        It is below a byte, or too large.
    """
    found = _SIZE.fullmatch(text)
    if not found:
        return 0
    exponent = "kMGT".index(found[2].replace("K", "k")) + 1 if found[2] else 0
    size: float = float(found[1]) * (1024 if found[3] else 1000) ** exponent
    if not 1 <= size <= SIZE_BYTES_MAX:
        raise LimitError(f"{text[:40]} is not between 1 byte and {SIZE_BYTES_MAX:,} bytes; choose another size")
    return round(size)


def bare_profile(size_bytes: int, bytes_per_value: int) -> StepProfile:
    """Return a step that only exchanges gradients of a size, and computes nothing."""
    layer = TimedLayer("gradients", max(1, size_bytes // bytes_per_value), forward_s=0.0, backward_s=0.0)
    return StepProfile(name=f"{size_bytes} bytes", layers=(layer,), batch=1, source="no computing")


def read_profile(path: Path) -> StepProfile:
    """Read a profile, written by `write_profile` or by hand.

    Raises
    ------
    dlcp.inputs.document.DocumentError
        The file cannot be read or is not a valid profile; the message names the line.
    """
    document = Document(path)
    profile = document.convert(StepProfile)
    if not profile.parameters:
        raise document.error("no layer has parameters, so there are no gradients to send", ("layers",))
    return profile


def write_profile(profile: StepProfile, path: Path) -> None:
    """Write a profile as YAML."""
    path.write_text(
        "# SPDX-License-Identifier: Apache-2.0\n" + yaml.safe_dump(msgspec.to_builtins(profile), sort_keys=False),
        encoding="utf-8",
    )


# ------------------------------------------------------------------------------------------- measuring a PyTorch model


class ProfileError(SimulatorError):
    """A model cannot be loaded or measured."""


class _TokensWantedError(Exception):
    """An embedding received numbers that are not among its ``vocabulary`` tokens."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary


@dataclass(frozen=True, slots=True)
class ModelInput:
    """The input of a model to measure.

    Parameters
    ----------
    batch
        Samples.
    shape
        Shape of one sample.
    vocabulary
        The model takes tokens below this number; 0 takes random numbers, or tokens if these go into an embedding.
    batch_from
        ``MODULE:FUNCTION``, which returns the input of a number of samples instead: a tensor, a tuple of arguments, or
        a dict of keyword arguments. The first or second dimension of a tensor must have that number.
    """

    batch: int
    shape: tuple[int, ...] = ()
    vocabulary: int = 0
    batch_from: str = ""

    def arguments(self, torch: Any, device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and the keyword arguments; tensors are on the device."""
        if self.batch_from:
            found = _users(self.batch_from, load_factory(self.batch_from), self.batch)
            if found is None:
                raise ProfileError(
                    f"{self.batch_from} returned nothing; it must return a tensor, a tuple of arguments, or a dict of "
                    "keyword arguments"
                )
            shapes = [tuple(tensor.shape) for tensor in _tensors(torch, found)]
            # Sequences may come first, and the samples second.
            if shapes and not any(self.batch in shape[:2] for shape in shapes):
                raise ProfileError(
                    f"{self.batch_from} was asked for {self.batch} samples, and returned a tensor of shape {shapes[0]}"
                    ": return as many as its argument says, in the first or second dimension"
                )
            if isinstance(found, Mapping):
                return (), {name: _moved(torch, value, device) for name, value in found.items()}
            values = found if isinstance(found, tuple) else (found,)
            return tuple(_moved(torch, value, device) for value in values), {}
        shape = (self.batch, *self.shape)
        if self.vocabulary:
            return (torch.randint(self.vocabulary, shape, device=device),), {}
        return (torch.randn(shape, device=device),), {}


def _moved(torch: Any, value: Any, device: str) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def load_factory(name: str) -> Callable[..., Any]:
    """Return the function that ``MODULE:FUNCTION`` names; modules in the working folder are found, as by ``python -m``.

    Raises
    ------
    ProfileError
        It cannot be imported, or is not callable.
    """
    module, _, function = name.partition(":")
    if not module or not function or module.startswith("."):
        raise ProfileError(f"{name!r} is not a function; name a module and a function in it, as MODULE:FUNCTION")
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, folder)
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise _raised(name, error) from error
        raise ProfileError(
            f"{name}: there is no module {error.name!r} here; run in its folder, or install it"
        ) from None
    except (Exception, SystemExit) as error:
        raise _raised(name, error) from error
    found: Callable[..., Any] | None = getattr(imported, function, None)
    if found is None:
        names = [each for each, value in vars(imported).items() if callable(value) and not each.startswith("_")]
        raise ProfileError(f"{name}: {module} has no attribute {function!r}{nearest(function, names)}")
    if not callable(found):
        raise ProfileError(f"{name} is not a function but a {type(found).__name__}; name a function")
    return found


def _users(name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function of the user; errors in it are `ProfileError`."""
    try:
        return function(*arguments, **options)
    except (_TokensWantedError, ProfileError):
        raise
    except (Exception, SystemExit) as error:
        raise _raised(name, error) from error


def _raised(name: str, error: BaseException) -> ProfileError:
    """Return an error with the exception that a user's code has raised, and the line of that code."""
    frames = traceback.extract_tb(error.__traceback__)
    others = ("<", sysconfig.get_path("stdlib"), __file__)
    own = [each for each in frames if not each.filename.startswith(others) and "site-packages" not in each.filename]
    at = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    if isinstance(error, SyntaxError) and error.filename:
        at = f" ({error.filename}, line {error.lineno})"
    text = str(error).strip().partition("\n")[0]
    return ProfileError(f"{name} raised {type(error).__name__}{f': {text}' if text else ''}{at}")


def measured_profile(name: str, given: ModelInput, device: str = "cpu") -> StepProfile:
    """Return the profile of the model that ``MODULE:FUNCTION`` returns; see `measure`.

    First the model is made without its values (PyTorch's meta device), as far as its code allows it, to refuse one that
    does not fit into memory.

    Raises
    ------
    ProfileError
        See `load_factory` and `measure`; or the model needs more memory than is free.
    """
    import torch

    factory = load_factory(name)
    _check_memory(torch, name, factory, given, device)
    model = _users(name, factory)
    # PyTorch refuses some models and inputs before the first pass, such as scripted modules.
    profile: StepProfile = _users(name, lambda: measure(model, given, name=name, device=device))
    return profile


def _check_memory(torch: Any, name: str, factory: Callable[..., Any], given: ModelInput, device: str) -> None:
    """Refuse a model whose values, gradients and activations do not fit into the memory that is free."""
    sizes: dict[int, int] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()
        return tensor

    try:
        with torch.device("meta"):
            model = factory()
        for value in (*model.parameters(), *model.buffers()):
            keep(value)
    except (Exception, SystemExit):
        return  # it may read its values; real errors show when it is made with them
    values = dict(sizes)
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            _with_tokens(torch, given, "meta", lambda args, options: model(*args, **options))
    except (Exception, SystemExit):
        sizes = values  # it computes with values; only the parameters are known
    needed = sum(values.values()) + sum(sizes.values())  # gradients are as large as values
    try:
        free = int(torch.cuda.mem_get_info(device)[0]) if device.startswith("cuda") else available_bytes()
    except (OSError, RuntimeError, AssertionError):
        return  # no such device; moving the model will report it
    if needed > free:
        parameters = sum(each.numel() for each in model.parameters())
        raise ProfileError(
            f"{name}: a step of {parameters:,} parameters and {given.batch} samples takes about {needed / 1e9:.1f} GB "
            f"on {device}, and {free / 1e9:.1f} GB are free; take fewer samples, a larger device, or a published "
            f"model: {', '.join(MODELS)}"
        )


def _with_tokens(
    torch: Any, given: ModelInput, device: str, call: Callable[[tuple[Any, ...], dict[str, Any]], Any]
) -> tuple[ModelInput, Any]:
    """Call with a model's input: with tokens of all its embeddings, if numbers go into some; return what was given."""
    functional = torch.nn.functional

    # `torch` is loaded only where it is needed, so type checkers do not know this class.
    class Checked(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        """Checks the input of embeddings, with and without a module."""

        def __torch_function__(
            self, function: Any, _: Any, args: tuple[Any, ...] = (), options: dict[str, Any] | None = None
        ) -> Any:
            options = options or {}
            if function in (functional.embedding, functional.embedding_bag, functional.one_hot):
                named = (options[name] for name in ("input", "weight", "num_classes") if name in options)
                tokens, *rows = (*args, *named)[:2]
                _check_tokens(torch, tokens, rows[0] if rows else -1)
            return function(*args, **options)

    while True:
        try:
            with Checked():
                return given, call(*given.arguments(torch, device))
        except _TokensWantedError as error:
            # Tokens below the smallest vocabulary are in all of them.
            if given.batch_from or 0 < given.vocabulary <= error.vocabulary or error.vocabulary < 1:
                below = f" from 0 to {error.vocabulary - 1:,}" if error.vocabulary > 0 else ""
                where = given.batch_from or "--tokens"
                raise ProfileError(
                    f"{where}: an embedding takes whole numbers{below}, and got others; change these tokens"
                ) from None
            given = dataclasses.replace(given, vocabulary=error.vocabulary)


def _check_tokens(torch: Any, tokens: Any, rows: Any) -> None:
    """Raise `_TokensWantedError` if some numbers are not rows of an embedding, given as a matrix or as their number."""
    count = rows if isinstance(rows, int) else len(rows)
    if not isinstance(tokens, torch.Tensor) or not tokens.numel():
        return
    if tokens.is_floating_point():
        raise _TokensWantedError(count)
    # Tensors on PyTorch's meta device have no values. A negative count is that of the tokens.
    if not tokens.is_meta and (tokens.min() < 0 or 0 <= count <= tokens.max()):
        raise _TokensWantedError(count)


def measure(model: Any, given: ModelInput, *, name: str, device: str = "cpu", rounds: int = 5) -> StepProfile:
    """Return a model's profile.

    Each module with parameters of its own is a layer; layers are in the order in which the model calls them. Modules
    without parameters (activations, pooling) count towards the layer before them, so that the layers' times add up to
    the step's.

    Parameters
    ----------
    model
        ``torch.nn.Module``.
    rounds
        Measured passes, after one to warm up; the profile has their medians.

    Raises
    ------
    ProfileError
        ``model`` is not a module, has no parameters, cannot be moved to ``device``, or raises an error; or it returns
        nothing that a gradient could be computed of.
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        raise ProfileError(f"{name} returned a {type(model).__name__}; it must return a torch.nn.Module")
    try:
        model = model.to(device).train()
    except Exception as error:
        reason = describe(error).partition("\n")[0]
        raise ProfileError(f"{name} cannot be moved to device {device!r}: {reason}") from None
    layers = [(path, module) for path, module in model.named_modules() if list(_trained(module))]
    if not layers:
        raise ProfileError(f"{name}: the model has no parameters to train")
    for module in model.modules():
        if getattr(module, "inplace", False):
            module.inplace = False  # autograd refuses to change a tensor in place behind a backward hook
    marks: list[tuple[str, float]] = []

    def note(path: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if device != "cpu":
                torch.cuda.synchronize(device)
            marks.append((path, time.perf_counter()))

        return hook

    handles = []
    for path, module in layers:
        handles.append(module.register_forward_pre_hook(note(path)))
        handles.append(module.register_full_backward_hook(note(path)))
    passes = []

    def one_pass(args: tuple[Any, ...], options: dict[str, Any]) -> None:
        def backward() -> Any:
            return _pass(torch, model, args, options, marks, note)

        passes.append(_users(name, backward))

    try:
        with warnings.catch_warnings():
            # Inputs need no gradient, so the first layer's hook fires once its parameters' gradients are ready.
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            given, _ = _with_tokens(torch, given, device, one_pass)
            args, options = given.arguments(torch, device)
            for _ in range(rounds):
                one_pass(args, options)
    finally:
        for handle in handles:
            handle.remove()
    forward, backward = zip(*passes[1:], strict=True)
    outputs = _outputs(torch, model, args, options, name)
    called = list(passes[0][0])  # by forward pass
    layers.sort(key=lambda layer: called.index(layer[0]) if layer[0] in called else len(called))
    # Layers may share parameters. Their gradient is ready when the first layer's is, because that comes last.
    own = {parameter: path for path, module in reversed(layers) for parameter in _trained(module)}
    values = Counter[str]()
    for parameter, path in own.items():
        values[path] += parameter.numel()
    timed = tuple(
        TimedLayer(path, values[path], _median(forward, path), _median(backward, path), outputs.get(path, 0))
        for path, _ in layers
    )
    source = f"measured with PyTorch {torch.__version__} on {device}, median of {rounds} passes"
    return StepProfile(name, timed, given.batch, source)


def _outputs(torch: Any, model: Any, args: tuple[Any, ...], options: dict[str, Any], name: str) -> dict[str, int]:
    """Return the bytes that later layers need from each layer and earlier ones, where the model can be cut after it.

    It can be cut before the first use of the next layer's parameters, unless parameters are used on both sides.
    """
    try:
        exported = torch.export.export(model, args, options, strict=False)
    except Exception as error:
        reason = describe(error).partition("\n")[0]
        log.warning("%s cannot be cut into stages: torch.export does not follow it: %s", name, reason)
        return {}
    nodes = list(exported.graph.nodes)
    at = {node: number for number, node in enumerate(nodes)}
    parameters = {**exported.graph_signature.inputs_to_parameters, **exported.graph_signature.inputs_to_buffers}
    uses: defaultdict[str, list[int]] = defaultdict(list)
    for node in nodes:
        if node.name in parameters and node.users:
            uses[parameters[node.name].rpartition(".")[0]] += [at[user] for user in node.users]
    order = sorted(uses, key=lambda path: min(uses[path]))
    found = {}
    for path, following in pairwise(order):
        cut = min(uses[following])
        if max(max(uses[each]) for each in order[: order.index(following)]) < cut:
            values = [
                node.meta["val"]
                for node in nodes[:cut]
                if node.name not in parameters and any(at[user] >= cut for user in node.users)
            ]
            found[path] = sum(each.numel() * each.element_size() for each in values if isinstance(each, torch.Tensor))
    return found


def _trained(module: Any) -> Iterator[Any]:
    """Yield a module's own parameters that are trained."""
    return (parameter for parameter in module.parameters(recurse=False) if parameter.requires_grad)


def _median(passes: Sequence[Mapping[str, float]], path: str) -> float:
    return statistics.median(seconds[path] for seconds in passes)


def _tensors(torch: Any, value: Any) -> list[Any]:
    """Return the tensors of a model's input or output: one, or any nesting of them."""
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value) and not isinstance(value, (Mapping, type)):
        value = [getattr(value, each.name) for each in dataclasses.fields(value)]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    return [found for part in parts for found in _tensors(torch, part)]


def _pass(
    torch: Any,
    model: Any,
    args: tuple[Any, ...],
    options: dict[str, Any],
    marks: list[tuple[str, float]],
    note: Callable[[str], Callable[..., None]],
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds by layer of one forward and one backward pass.

    A layer's forward pass ends where the next layer's begins. Its backward pass begins where the next layer's ends.
    """
    forward: defaultdict[str, float] = defaultdict(float)
    backward: defaultdict[str, float] = defaultdict(float)
    model.zero_grad()
    marks.clear()
    output = model(*args, **options)
    parts = [each for each in _tensors(torch, output) if each.requires_grad]
    if not parts:
        raise ProfileError(f"the model returns {type(output).__name__} without a tensor to train on; return its output")
    loss = sum(part.abs().square().mean() for part in parts)
    note("")()
    for (path, begin), (_, end) in pairwise(marks):
        forward[path] += end - begin
    marks.clear()
    note("")()
    loss.backward()
    for (_, begin), (path, end) in pairwise(marks):
        backward[path] += end - begin
    return forward, backward
