# SPDX-License-Identifier: Apache-2.0
"""A first experiment from the answers to a few questions, as a file with comments.

Names come from the records that describe a simulation, and comments from their docstrings.
"""

import contextlib
import inspect
import math
import re
import shlex
import textwrap
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from dlcp.inputs.configuration import LOSS_BOUND
from dlcp.inputs.error_text import nearest
from dlcp.sim.experiments.experiment import Experiment, RunSetting, changed_fields
from dlcp.sim.experiments.fitted_network import FABRICS, TRANSPORT_KINDS, FittedNetwork, suited_discipline
from dlcp.sim.graphs.collectives import WITH_SERVERS, CollectiveName
from dlcp.sim.jobs.models import MODELS, THROUGHPUTS
from dlcp.sim.jobs.training import TrainingJob
from dlcp.sim.limits import HOSTS_MAX
from dlcp.sim.network.nodes import LinkSpec

Answers = Mapping[str, Any]
"""The answers so far, by the names of the questions."""
PACKETS_UP_TO: Final = 256
"""More workers are simulated as flows if their transport allows it, and by default reduce with fewer messages: a direct
all-reduce of 1,024 has two million of them for each layer."""
_WORKERS_PER_SERVER: Final = 4
_IMAGES: Final = 32
"""Batch of a worker, as in the experiments that come with DLCP: a published throughput has larger ones, which hide all
communication. Other models keep the published batch."""
_WIDTH: Final = 110
_ALSO_SHOWN: Final = ("scheduler", "steps", "seed", "engine", "spines", "oversubscription")
"""Fields that are in the file even if they have their default."""
_COLLECTIVES: Final = typing.get_args(CollectiveName)


@dataclass(frozen=True, slots=True)
class Question:
    """A question about the job or the network.

    Parameters
    ----------
    text
        The question, without a question mark.
    default
        The default answer, given the answers so far.
    parse
        Turns an answer into its value; raises ValueError with a message for the user.
    choices
        The known names, given the answers so far; none for a number.
    """

    name: str
    text: str
    default: Callable[[Answers], Any]
    parse: Callable[[str, Answers], Any]
    choices: Callable[[Answers], Sequence[str]] = lambda answers: ()


def _default(struct: type[msgspec.Struct], field: str) -> Any:
    return next(each.default for each in msgspec.structs.fields(struct) if each.name == field)


def _one_of(name: str, text: str, default: Any, choices: Callable[[Answers], Sequence[str]]) -> Question:
    """Return a question with known names; ``default`` is one of them, or chooses one by the answers so far."""

    def parse(answer: str, answers: Answers) -> str:
        return _check_name(name, answer, choices(answers))

    return Question(name, text, default if callable(default) else lambda answers: default, parse, choices)


def _check_name(name: str, answer: str, known: Sequence[str]) -> str:
    if answer not in known:
        raise ValueError(f"there is no {name} {answer!r}{nearest(answer, known)}")
    return answer


def _workers(answer: str, answers: Answers) -> int:
    if not re.fullmatch(r"\d{1,9}", answer) or not 2 <= int(answer) <= HOSTS_MAX:
        raise ValueError(f"expected a whole number from 2 to {HOSTS_MAX:,}, got {answer[:20]!r}")
    return int(answer)


def _rate(answer: str, answers: Answers) -> float:
    try:
        return msgspec.convert({"rate_gbps": float(answer)}, LinkSpec).rate_gbps
    except ValueError:
        raise ValueError(f"expected a rate above 0 and up to 10,000 Gbit/s, got {answer[:20]!r}") from None


def _gpus(answers: Answers) -> list[str]:
    return list(dict.fromkeys(each.gpu for each in THROUGHPUTS if each.model == answers["model"]))


def _default_gpu(answers: Answers) -> str:
    known, usual = _gpus(answers), str(_default(TrainingJob, "gpu"))
    return usual if usual in known else known[0]


def _default_collective(answers: Answers) -> str:
    workers = answers["workers"]
    if workers <= PACKETS_UP_TO:
        return "direct"
    if workers & (workers - 1) == 0:
        return "halving_doubling"
    return "hierarchical" if _group(workers) > 1 else "tree"


def _group(workers: int) -> int:
    """Return how many workers of many form a group: a divisor near the square root, for the fewest messages."""
    if workers <= PACKETS_UP_TO:
        return int(_default(TrainingJob, "group"))
    return next(size for size in range(math.isqrt(workers), 0, -1) if workers % size == 0)


def _collective(answer: str, answers: Answers) -> str:
    _check_name("collective", answer, _COLLECTIVES)
    collective: Any = answer
    workers = answers["workers"]
    TrainingJob(
        name="job", workers=workers, servers=_servers(answer, workers), collective=collective, group=_group(workers)
    )
    return answer


def _servers(collective: str, workers: int) -> int:
    return max(1, workers // _WORKERS_PER_SERVER) if collective in WITH_SERVERS else 0


QUESTIONS: Final = (
    _one_of(
        "model", "Model", _default(TrainingJob, "model"), lambda _: list(dict.fromkeys(e.model for e in THROUGHPUTS))
    ),
    _one_of("gpu", "GPU", _default_gpu, _gpus),
    Question("workers", "Workers, one GPU each", lambda answers: _default(TrainingJob, "workers"), _workers),
    Question("collective", "Collective", _default_collective, _collective, lambda answers: _COLLECTIVES),
    _one_of("fabric", "Fabric", "leaf_spine", lambda answers: FABRICS),
    Question("rate_gbps", "Rate of each host's link in Gbit/s", lambda answers: 25.0, _rate),
    _one_of("transport", "Transport", "dlcp", lambda answers: list(TRANSPORT_KINDS)),
    _one_of(
        "discipline",
        "Discipline of the switches",
        lambda answers: suited_discipline(answers["transport"]),
        lambda answers: TRANSPORT_KINDS[answers["transport"]].disciplines,
    ),
)
"""The questions for a first experiment; later answers depend on earlier ones."""


def guided_setting(answers: Answers) -> RunSetting:
    """Return the setting that the answers describe.

    Raises
    ------
    ValueError
        The fabric has room for fewer hosts.
    """
    model, gpu, transport, collective = (answers[name] for name in ("model", "gpu", "transport", "collective"))
    precisions = [each.precision for each in THROUGHPUTS if (each.model, each.gpu) == (model, gpu)]
    is_dlcp = transport == "dlcp"
    job = TrainingJob(
        name="job",
        model=model,
        gpu=gpu,
        gpu_precision="mixed" if "mixed" in precisions else precisions[0],
        batch=_IMAGES if MODELS[model].sample == "image" else None,
        workers=answers["workers"],
        servers=_servers(collective, answers["workers"]),
        collective=collective,
        group=_group(answers["workers"]) if collective == "hierarchical" else _default(TrainingJob, "group"),
        scheduler="dlcp" if is_dlcp else "fifo",
        transport=transport,
        loss_bound=LOSS_BOUND if is_dlcp else 0.0,
    )
    network = FittedNetwork(
        answers["fabric"], answers["rate_gbps"], transport=transport, discipline=answers["discipline"]
    )
    setting = RunSetting(**network.fields(job.workers + job.servers), training=(job,))
    if job.workers > PACKETS_UP_TO:
        with contextlib.suppress(ValueError):  # flows cannot represent every transport
            setting.check_engine("flows")
            setting = msgspec.structs.replace(setting, engine="flows")
    # A struct checks the ranges of its fields only when it is converted.
    checked = msgspec.convert(msgspec.to_builtins(setting), RunSetting)
    checked.check_senders("training")
    return checked


def guided_experiment(answers: Answers, path: Path) -> str:
    """Return the text of an experiment file.

    Parameters
    ----------
    path
        The file that will have the text, which also names the experiment.

    Raises
    ------
    ValueError
        See `guided_setting`.
    """
    setting = guided_setting(answers)
    name = re.sub(r"[^a-z0-9]+", "_", path.stem.lower()).strip("_") or "experiment"
    file, job = shlex.quote(str(path)), setting.training[0]
    head = {
        "name": name,
        "title": f"{job.model} on {job.workers} {job.gpu.upper()} GPUs at {answers['rate_gbps']:g} Gbit/s",
        "question": "How long does a step take?",
    }
    lines = [
        f"# Run it:    dlcp sim run {file}",
        f"# Watch it:  dlcp sim play {file} --output step.html",
        f"# As tables: dlcp sim run {file} --csv tables",
        "# Mistakes are reported with their line and the nearest valid name. Other keys, axes that vary a value, and",
        "# what the numbers mean: sim/experiments/README.md",
        *(f"{key}: {_scalar(value)}" for key, value in head.items()),
        *_comment(_meanings(Experiment)["setting"], ""),
        "setting:",
        *_commented(setting, "  ", {*(question.name for question in QUESTIONS), *_ALSO_SHOWN}),
    ]
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------------------------------------------- commented YAML


def _commented(struct: msgspec.Struct, indent: str, shown: Collection[str]) -> Iterator[str]:
    """Yield the lines of a struct: fields that are ``shown`` or differ from their defaults, under their meanings."""
    changed, meanings = changed_fields(struct), _meanings(type(struct))
    types = typing.get_type_hints(type(struct))
    if "kind" in changed:
        yield f"{indent}kind: {changed['kind']}"
    for field in struct.__struct_fields__:
        if field not in changed and field not in shown:
            continue
        value = getattr(struct, field)
        if value == () or (isinstance(value, dict) and not value):
            continue
        names = typing.get_args(types[field]) if typing.get_origin(types[field]) is typing.Literal else ()
        meaning = meanings.get(field, "")
        if isinstance(value, msgspec.Struct) and not isinstance(value, LinkSpec):
            meaning = inspect.cleandoc(type(value).__doc__ or "").partition("\n")[0]
        if any(f"`{name}`" not in meaning for name in names):
            meaning += f" One of: {', '.join(map(str, names))}."
        yield from _comment(meaning, indent)
        yield from _valued(field, value, indent, shown)


def _valued(key: str, value: Any, indent: str, shown: Collection[str]) -> Iterator[str]:
    inner = indent + "  "
    if isinstance(value, LinkSpec):
        yield f"{indent}{key}: {_scalar(changed_fields(value) or {'rate_gbps': value.rate_gbps})}"
    elif isinstance(value, msgspec.Struct):
        lines = list(_commented(value, inner, shown))
        yield from [f"{indent}{key}:", *lines]
    elif isinstance(value, dict):
        yield f"{indent}{key}:"
        for name, each in value.items():
            yield from _valued(name, each, inner, shown)
    elif isinstance(value, tuple) and value and isinstance(value[0], msgspec.Struct):
        yield f"{indent}{key}:"
        for each in value:
            lines = list(_commented(each, inner + "  ", shown))
            first = next(number for number, line in enumerate(lines) if not line.lstrip().startswith("#"))
            lines[first] = f"{inner}- {lines[first].lstrip()}"
            yield from lines
    else:
        yield f"{indent}{key}: {_scalar(value)}"


def _scalar(value: Any) -> str:
    return yaml.safe_dump([value], default_flow_style=True, sort_keys=False, width=1000).strip()[1:-1]


def _comment(text: str, indent: str) -> list[str]:
    return [f"{indent}# {line}" for line in textwrap.wrap(text.strip(), _WIDTH - len(indent))]


def _meanings(kind: type) -> dict[str, str]:
    """Return the first sentence about each field, from a record's docstrings; none if Python has removed them."""
    sections = (inspect.cleandoc(each.__doc__ or "").partition("Parameters\n----------\n")[2] for each in kind.__mro__)
    text = "\n".join(sections)
    found = re.findall(r"^(\w[\w, ]*)\n((?:(?: +.*)?(?:\n|$))+)", text, re.MULTILINE)
    return {
        name: re.split(r"(?<=[.])\s", " ".join(meaning.replace("``", "`").split()))[0]
        for names, meaning in found
        for name in names.split(", ")
    }
