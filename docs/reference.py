# SPDX-License-Identifier: Apache-2.0
"""Generate parts of pages, from the code and from recorded results: ``python docs/reference.py``.

The function NAME below writes what stands between ``<!-- of: NAME -->`` and ``<!-- end -->``. So a fact is
stated only in the code, but pages are complete on a code host, too; a test compares them. On the site, Sphinx
replaces tables of public names by their docstrings.
"""

import argparse
import importlib
import inspect
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from typing import Any, Final, get_args

from numpy.typing import ArrayLike
from sphinx.application import Sphinx
from sphinx.ext.autodoc.mock import mock
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.typing import stringify_annotation

from dlcp import cli, wire
from dlcp.commands.common import own_experiments
from dlcp.convergence import curve
from dlcp.inputs.configuration import PREFIX, options_of
from dlcp.session import Options
from dlcp.sim.experiments.experiment import read
from dlcp.sim.graphs import collectives
from dlcp.sim.jobs.models import MODELS, THROUGHPUTS
from dlcp.sim.network.topology import TopologySpec
from dlcp.sim.tools.report import signed, words_of
from dlcp.sim.transports.specs import TransportSpec
from dlcp.transport import TransportOptions
from dlcp.values.planes import CODED_BITS, FULL_BITS
from dlcp.wire import dscp
from dlcp.wire.dissector import LABELS
from dlcp.wire.payloads import PLANE_BLOCK_VALUES, PLANE_DIGIT_BITS

MISSING: Final = [name for name in ("jax", "keras", "mxnet", "optax", "tensorflow", "torch") if find_spec(name) is None]
"""Frameworks have environments of their own; their adapters' docstrings are read without them."""
RESULTS: Final = Path(__file__).parent / "gallery" / "results.json"
"""The results of all experiments that the gallery shows."""
_PLACE: Final = re.compile(r"^<!-- of: (\w+)(?: ([\w.]+))? -->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
_ROLE: Final = re.compile(r":\w+:`~?([^`<]+?)(?: <[^`>]+>)?`")
_ANNOTATED: Final = "Annotated["
_ARRAY_LIKE: Final = [stringify_annotation(ArrayLike, mode) for mode in ("smart", "fully-qualified")]
_COLUMNS: Final = 100
"""Width of the commands' help."""
_documented: Final[dict[Any, str]] = {}
"""The full name under which each public class and function is documented; some are exported twice."""


def commands() -> str:
    """Return the help of every command and of its actions."""
    return "\n".join(_help_pages(cli.parser_of(cli.COMMANDS), "##"))


def _help_pages(parser: argparse.ArgumentParser, heading: str) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                child.formatter_class = _formatter(child.formatter_class)
                yield f"{heading} {child.prog}\n\n```text\n{child.format_help().rstrip()}\n```\n"
                yield from _help_pages(child, "###")


def _formatter(formatter: Any) -> Any:
    return lambda prog: formatter(prog, width=_COLUMNS)


def options() -> str:
    """Return every option of a training session: its environment variable, default, declaration and description."""
    meanings = {**_parameters(TransportOptions), **_parameters(Options)}
    written = []
    for name, option in options_of(Options).items():
        shown = "none" if option.default in ("", None) else f"`{option.default}`"
        line = "; ".join(filter(None, [f"`{PREFIX}{name.upper()}`, default {shown}", option.describe()]))
        written.append(f"## {name}\n\n{line}\n\n{_markdown(meanings[name])}")
    return "\n\n".join(written)


def _parameters(cls: type) -> dict[str, str]:
    """Return the descriptions of a class's parameters from its numpydoc docstring, without references to others."""
    text = dedent(inspect.getdoc(cls) or "").partition("Parameters\n----------\n")[2]
    found = re.findall(r"^(\w[\w, ]*)\n((?:(?:    .*)?\n)+)", text + "\n", re.MULTILINE)
    return {
        name: dedent(meaning).strip()
        for names, meaning in found
        for name in names.split(", ")
        if not meaning.strip().startswith("See :class:`dlcp.transport")
    }


def _markdown(text: str) -> str:
    """Return text in reStructuredText as Markdown: references become code."""
    return _ROLE.sub(r"`\1`", text.replace("``", "`"))


def _rst(text: str) -> str:
    return f"```{{eval-rst}}\n{text}\n```"


def header() -> str:
    """Return the fields of a packet's header, in wire order."""
    lines = ["| Byte | Bits | Field | Meaning |", "|---:|---:|---|---|"]
    at = 0
    for name, bits in wire.FIELD_BITS.items():
        lines.append(f"| {at // 8} | {bits} | `{name}` | {LABELS[name]} |")
        at += bits
    return "\n".join(lines)


def coding() -> str:
    """Return how values of each precision are encoded."""
    lines = ["| Bits of a value | Planes | Bits of a digit | Coding in the flags |", "|---:|---:|---:|---|"]
    for bits, flags in wire.CODING.items():
        digit_bits = PLANE_DIGIT_BITS[bits]
        lower = f"; {flags | wire.CODING_LOWER} in the lower plane" if bits > digit_bits else ""
        lines.append(f"| {bits} | {bits // digit_bits} | {digit_bits} | {flags}{lower} |")
    return f"Values are encoded in blocks of {PLANE_BLOCK_VALUES}:\n\n" + "\n".join(lines)


def members(name: str) -> str:
    """Return the members of an enumeration of ``dlcp.wire``, with the docstrings in its source."""
    enum = getattr(wire, name)
    said = ModuleAnalyzer.for_module(enum.__module__).find_attr_docs()
    lines = ["| Value | Name | Meaning |", "|---:|---|---|"]
    for member, value in enum.__members__.items():
        meaning = " ".join(said.get((name, member), [""])).strip().replace("``", "`")
        number = f"0x{value:02x}" if name == "Flag" else int(value)
        lines.append(f"| {number} | {member} | {meaning} |")
    return "\n".join(lines)


def dscps() -> str:
    """Return the DSCP of each queue, in decimal."""
    lines = ["| Queue | DSCP | DSCP if droppable |", "|---:|---:|---:|"]
    return "\n".join(
        [*lines, *(f"| {queue} | {dscp(queue, False)} | {dscp(queue, True)} |" for queue in range(7, -1, -1))]
    )


def ports() -> str:
    """Return the UDP ports and the size of the header."""
    last = wire.UDP_PORT_BASE + wire.UDP_PORT_COUNT - 1
    return f"UDP destination ports {wire.UDP_PORT_BASE}-{last}, version {wire.VERSION}, {wire.HEADER_BYTES} bytes."


def simulated() -> str:
    """List the simulator's models, fabrics, collectives and transports, by their names in experiment files."""
    models = ["| Model | Parameters | Batches of | Published throughput for |", "|---|---:|---|---|"]
    for name, model in MODELS.items():
        gpus = dict.fromkeys(each.gpu for each in THROUGHPUTS if each.model == name)
        parameters = f"{sum(layer.parameters for layer in model.layers) / 1e6:,.1f} M"
        models.append(f"| `{name}` | {parameters} | {model.sample}s | {', '.join(map(str.upper, gpus))} |")
    described = {
        "Fabric": {str(kind.__struct_config__.tag): kind for kind in get_args(TopologySpec)},
        "Collective": {name: getattr(collectives, name) for name in get_args(collectives.CollectiveName)},
        "Transport": {str(kind.__struct_config__.tag): kind for kind in get_args(TransportSpec)},
    }
    tables = ["\n".join(models)]
    for title, choices in described.items():
        rows = [f"| `{name}` | {_first_sentence(value).removeprefix('Add ')} |" for name, value in choices.items()]
        tables.append("\n".join([f"| {title} | |", "|---|---|", *rows]))
    return "\n\n".join(tables)


def _first_sentence(value: Any) -> str:
    return _markdown(" ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split()))


def precision_costs() -> str:
    """Return the steps that fewer bits cost, relative to 32 bits, from the simulator's curves."""
    curves = {name: dict(curve(f"precision_{name}").points) for name in ("sgd", "adamw")}
    lines = ["| Bits per value | SGD with momentum | AdamW |", "|---:|---:|---:|"]
    for bits in CODED_BITS:
        sgd, adamw = (costs[1 - bits / FULL_BITS] for costs in curves.values())
        lines += [f"| {bits} | {sgd:.2f} | {adamw:.2f} |"]
    return "\n".join(lines)


def experiment(name: str) -> str:
    """Return the first plot of an experiment, its question, and its published figures next to the simulated ones."""
    described = read(own_experiments()[name], quick=True).experiment
    lines = [
        f"![{described.figures[0].title}](gallery/{name}_1.svg)",
        f"{described.question.strip()} `dlcp sim all {name} --quick`",
    ]
    rows = []
    for figure in json.loads(RESULTS.read_text())["figures"]:
        whole, _, claim = figure["name"].partition(".")
        if whole == name and figure["measured"] is not None:
            least, most = figure["spread"]
            shown = signed(figure["measured"], figure["unit"])
            spread = f" ({signed(least, figure['unit'])} to {signed(most, figure['unit'])})" if least != most else ""
            published = signed(figure["paper"], figure["unit"])
            rows.append(f"| {words_of(claim)} | {published} | {shown}{spread} |")
    if rows:
        lines.append("\n".join(["| Figure | Published | Simulated |", "|---|---:|---:|", *rows]))
    return "\n\n".join(lines)


def speed_ups() -> str:
    """Return how much faster than Gloo each method of DLCP trains to the same loss, from the table of alternatives."""
    page = (Path(__file__).parent / "alternatives.md").read_text()
    table = page.split("## Time to the same loss")[1].split("\n\n|")[1]
    networks, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    seconds = {name: [float(cell.replace("*", "").split()[0]) for cell in cells] for name, *cells in rows}
    shown = {
        "DLCP, `precision=8`": "8 bits",
        "DLCP, `precision=4`": "4 bits",
        "`LocalSGD` (period, bits)": "`LocalSGD`",
    }
    lines = ["| Network | " + " | ".join(shown.values()) + " |", "|---|---:|---:|---:|"]
    for column, network in enumerate(networks[1:]):
        gains = (f"{seconds['Gloo'][column] / seconds[name][column]:.2g}x" for name in shown)
        lines.append(f"| *{network}* | " + " | ".join(gains) + " |")
    return "\n".join(lines)


def _exported(module_name: str) -> list[str]:
    """Return the names that a module exports; without ``__all__``, those that it defines."""
    module = importlib.import_module(module_name)
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module_name]
    return list(getattr(module, "__all__", None) or [name for name in own if not name.startswith("_")])


def public(module_name: str) -> str:
    """Return a table of the names that a module exports."""
    return _table([f"{module_name}.{name}" for name in _exported(module_name)])


def name(full_name: str) -> str:
    """Return a table of one public name of a module."""
    return _table([full_name])


def _table(full_names: Iterable[str]) -> str:
    lines = ["| Name | |", "|---|---|"]
    for full_name in full_names:
        value = _value(full_name)
        if inspect.isclass(value) or inspect.isroutine(value):
            lines.append(f"| `{full_name}` | {_first_sentence(value)} |")
    return "\n".join(lines)


def _value(full_name: str) -> Any:
    module, _, own = full_name.rpartition(".")
    return getattr(importlib.import_module(module), own)


def _public_docstrings(module_name: str) -> str:
    """Return the names that a module exports with their docstrings, for Sphinx."""
    lines = [f".. automodule:: {module_name}", "   :no-members:", ""]
    for name in _exported(module_name):
        lines += _entry(f"{module_name}.{name}")
    return _rst("\n".join(lines))


def _docstring(full_name: str) -> str:
    """Return one public name with its docstring, for Sphinx."""
    return _rst("\n".join(_entry(full_name)))


def _entry(full_name: str) -> list[str]:
    value = _value(full_name)
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return []
    first = _documented.setdefault(value, full_name)
    if first != full_name:
        return [f"``{full_name}`` is :py:obj:`{first}`.", ""]
    if inspect.isroutine(value):
        return [f".. autofunction:: {full_name}", ""]
    return [f".. autoclass:: {full_name}\n   :members:", ""]


def readable(signature: str) -> str:
    """Return a signature with the types alone, without limits of values, which errors state."""
    for written in _ARRAY_LIKE:
        signature = signature.replace(written, "ArrayLike")
    while _ANNOTATED in signature:
        # The last one contains no other.
        before, _, rest = signature.rpartition(_ANNOTATED)
        depth, commas = 0, []
        for end, letter in enumerate(rest):
            depth += (letter in "[(") - (letter in "])")
            if letter == "," and depth == 0:
                commas.append(end)
            if depth < 0:
                break
        signature = before.removesuffix("typing.") + rest[: commas[0]] + rest[end + 1 :]
    return signature


_WRITERS: Final[Mapping[str, Callable[..., str]]] = {
    function.__name__: function
    for function in (
        commands,
        options,
        header,
        coding,
        members,
        dscps,
        ports,
        public,
        name,
        simulated,
        experiment,
        precision_costs,
        speed_ups,
    )
}
_FOR_SPHINX: Final[Mapping[str, Callable[..., str]]] = {"public": _public_docstrings, "name": _docstring}


def fill(text: str) -> str:
    """Return a page with its generated parts as they should be now."""

    def write(place: re.Match[str]) -> str:
        head = place[0].partition("\n")[0]
        return f"{head}\n\n{_written(_WRITERS, place)}\n\n<!-- end -->"

    return _PLACE.sub(write, text)


def _written(writers: Mapping[str, Callable[..., str]], place: re.Match[str]) -> str:
    return writers[place[1]](*filter(None, [place[2]])).strip()


def setup(app: Sphinx) -> dict[str, bool]:
    """Make Sphinx fill each page as it reads it."""

    def read(app: Sphinx, _page: str, source: list[str]) -> None:
        with mock(MISSING):
            source[0] = _PLACE.sub(
                lambda place: _written(_FOR_SPHINX, place) if place[1] in _FOR_SPHINX else place[0], source[0]
            )

    def shorten(*about: Any) -> tuple[str, str] | None:
        signature, returns = about[-2:]
        return (readable(signature), returns) if signature else None

    app.connect("source-read", read)
    app.connect("autodoc-process-signature", shorten)
    return {"parallel_read_safe": True}


def keep(folder: Path) -> None:
    """Copy what the gallery shows from the results of ``dlcp sim all --quick``."""
    for old in RESULTS.parent.glob("*_1.svg"):
        old.unlink()
    shutil.copy(folder / "summary.json", RESULTS)
    for plot in (folder / "figures").glob("*_1.svg"):
        shutil.copy(plot, RESULTS.parent)


def main() -> None:
    """Write the generated parts of all pages; given a folder of ``dlcp sim all --quick``, keep its results first."""
    for folder in sys.argv[1:]:
        keep(Path(folder))
    with mock(MISSING):
        for page in Path(__file__).parent.glob("*.md"):
            text = page.read_text()
            if (filled := fill(text)) != text:
                page.write_text(filled)
                print(page)


if __name__ == "__main__":
    main()
