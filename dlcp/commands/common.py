# SPDX-License-Identifier: Apache-2.0
"""Options that several commands have in common, and errors of commands."""

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from dlcp.inputs import configuration
from dlcp.inputs.configuration import LOSS_BOUND, Range
from dlcp.inputs.error_text import short

if TYPE_CHECKING:
    from dlcp.sim.jobs.models import ModelInput

_Number = TypeVar("_Number", int, float)
_Parser = argparse._ActionsContainer
"""A parser or a group of its options."""
MOST: Final = (1 << 31) - 1
"""Largest number on a command line."""
MBPS: Final = Range(0.001, 1e6)
"""Rates of links, in Mbit/s: from 1 kbit/s to 1 Tbit/s."""
DEPTH_MAX: Final = 1_000_000
"""Deepest queue, in packets: 1.5 GB of packets of 1,500 bytes."""
DURATIONS: Final = Range(0.0, 1e6, above=True)
"""Durations on a command line."""
DIFFERS: Final = 3
"""Exit status of ``dlcp fabric plan`` if a switch differs from the description."""


def refuse(command: str, error: object, status: int = 2) -> int:
    """Print why a command stops; return the exit status, 2 for a wrong command line or file."""
    print(f"dlcp {command}: {error}", file=sys.stderr)
    return status


def real(allowed: Range) -> Callable[[str], float]:
    """Return a type for argparse: numbers in a range."""
    return _number(float, "a number", allowed)


def whole(least: int, most: int = MOST) -> Callable[[str], int]:
    """Return a type for argparse: whole numbers from ``least`` to ``most``."""
    return _number(int, "a whole number", Range(least, most))


def _number(parse: Callable[[str], _Number], words: str, allowed: Range) -> Callable[[str], _Number]:
    def convert(text: str) -> _Number:
        try:
            value = parse(text)
        except ValueError:  # also of an int of thousands of digits, which Python refuses to convert
            raise argparse.ArgumentTypeError(f"expected {words}, got {short(text)}") from None
        if value not in allowed:
            raise argparse.ArgumentTypeError(f"must lie in {allowed}, got {short(text)}")
        return value

    return convert


def shape(text: str) -> tuple[int, ...]:
    """Return the shape of one sample, given as ``3,224,224``: a type for argparse."""
    try:
        return tuple(map(whole(1), text.split(",")))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"takes a shape such as 3,224,224, got {short(text)}: {error}") from None


def option(name: str) -> Callable[[str], Any]:
    """Return a type for argparse: the allowed values of the training option of that name."""
    from dlcp.session.options import Options  # few commands need it

    def convert(text: str) -> Any:
        try:
            return configuration.options_of(Options)[name].parse(name, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def add(parser: _Parser, flag: str, metavar: str, kind: Callable[[str], Any], use: str, **more: Any) -> None:
    """Declare an option with a value.

    Parameters
    ----------
    kind
        Turns the text into the value; raises ``argparse.ArgumentTypeError`` or ``ValueError``.
    use
        Its help; the default, if any, is added.
    more
        Further arguments of ``add_argument``.
    """
    default = "" if more.get("default") in (None, []) or "(default" in use else " (default: %(default)s)"
    parser.add_argument(flag, metavar=metavar, type=kind, help=(use + default).lstrip(), **more)


def add_json(parser: _Parser) -> None:
    """Declare ``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def add_model_input(parser: _Parser) -> None:
    """Declare the options that define the input of a model to measure; see `model_input`."""
    add(parser, "--input", "SHAPE", shape, "shape of a sample of a model to measure, such as 3,224,224, or 512 tokens")
    tokens = "the samples are tokens below N (default: tokens if they go into an embedding, else random numbers)"
    add(parser, "--tokens", "N", whole(1), tokens, default=0)
    own = "function that returns the model's input for N samples: a tensor, a tuple, or a dict of keyword arguments"
    add(parser, "--batch-from", "MODULE:FUNCTION", str, own)


def model_input(arguments: argparse.Namespace, batch: int) -> "ModelInput":
    """Return the input that the options of `add_model_input` describe, for ``batch`` samples.

    Raises
    ------
    ValueError
        They lack the input, or contradict each other.
    """
    from dlcp.sim.jobs.models import ModelInput

    if bool(arguments.input) == bool(arguments.batch_from):
        raise ValueError("give either --input, the shape of one sample such as 3,224,224, or --batch-from, a function")
    if arguments.batch_from and arguments.tokens:
        raise ValueError("--tokens is for --input; --batch-from returns the tokens itself")
    return ModelInput(batch, arguments.input or (), arguments.tokens, arguments.batch_from or "")


def add_option(parser: _Parser) -> None:
    """Declare ``--option NAME=VALUE``."""
    use = "set an option of DLCP, such as loss_bound=0.05; may be repeated (dlcp doctor --all-options lists them)"
    add(parser, "--option", "NAME=VALUE", str, use, action="append", default=[])


def add_steps(parser: _Parser, default: int, use: str = "training steps") -> None:
    """Declare ``--steps N``."""
    add(parser, "--steps", "N", whole(1), use, default=default)


def add_link(parser: _Parser, rate_mbps: float | None, depth_packets: int | None, defaults: Sequence[str] = ()) -> None:
    """Declare ``--rate-mbps RATE`` and ``--depth PACKETS``; ``defaults`` explain those that depend on others."""
    rate, depth = defaults or (f"{rate_mbps:g}", f"{depth_packets}")
    add(parser, "--rate-mbps", "RATE", real(MBPS), f"rate of each link (default: {rate})", default=rate_mbps)
    packets = whole(1, DEPTH_MAX)
    add(parser, "--depth", "PACKETS", packets, f"depth of each queue (default: {depth})", default=depth_packets)


def add_out(parser: _Parser, default: Path) -> None:
    """Declare ``--out FOLDER``."""
    add(parser, "--out", "FOLDER", Path, "where to write results", default=default)


def add_training(parser: _Parser, steps: int, out: Path) -> None:
    """Declare the options that ``dlcp demo`` and ``dlcp testbed run`` have in common."""
    from dlcp.transport.messages import SHARE  # few commands need it

    parser.add_argument(
        "--collective", choices=["direct", "ps"], help="all-reduce or parameter server (default: direct; with BMv2: ps)"
    )
    add(parser, "--seed", "N", whole(0), "seed of everything", default=1)
    add_steps(parser, steps)
    add(parser, "--loss-bound", "SHARE", real(SHARE), "share of a message that may be lost", default=LOSS_BOUND)
    bits = "bits of a value: 32, 16, 8, 4, or what is fastest: exact, auto (8 or 32), fast (also 4)"
    add(parser, "--precision", "BITS", option("precision"), bits, default="auto")
    only = "only these runs: gloo plain dlcp dlcp_priority; the page needs all of them but gloo, the figures do not"
    add(parser, "--only", "RUN", str, only, nargs="+")
    add_out(parser, out)


def own_experiments() -> dict[str, Path]:
    """Return the files of the simulator's experiments that come with DLCP, by name."""
    spec = importlib.util.find_spec("dlcp.sim")  # without its packages
    assert spec is not None
    assert spec.origin is not None
    return {path.stem: path for path in sorted((Path(spec.origin).parent / "experiments").glob("*.yaml"))}


def check_writable(flag: str, file: Path | None) -> None:
    """Raise ValueError if a file cannot be written, so that this is known before the work is done."""
    if file is None:
        return
    if file.is_dir():
        raise ValueError(f"{flag}: {file} is a folder; give a file")
    if not file.parent.is_dir():
        raise ValueError(f"{flag}: there is no folder {file.parent}")
    try:
        is_new = not file.exists()
        file.open("a").close()
        if is_new:
            file.unlink()
    except OSError as error:
        raise ValueError(f"{flag}: {file} cannot be written: {error.strerror}") from None


def check_folder(flag: str, folder: Path) -> None:
    """Create a folder for results; raise ValueError if it cannot be created or written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{flag}: {folder} cannot be written: {error.strerror}") from None


def write_late(command: str, file: Path, text: str) -> None:
    """Write a result; on failure only print a warning, because the work is done."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        refuse(command, f"warning: {file} was not written: {error.strerror}")
