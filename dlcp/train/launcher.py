# SPDX-License-Identifier: Apache-2.0
"""Runs an unchanged training script under torchrun, with DLCP switched on from within each rank.

A plan passes to the ranks as a variable of the environment; they leave their reports as files.
"""

import contextlib
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dlcp import configuration
from dlcp.children import python_command
from dlcp.interfaces import interface_of, only_way_out
from dlcp.suggestion import closest

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

Report = dict[str, Any]
"""``rank``, ``local_rank``, ``ranks``, ``restarts`` (how often torchrun has started this machine's ranks again),
``error`` (None, or the last line of what went wrong), ``backend`` (None without ``--backend``), ``models`` (a list),
and ``measured`` (None without ``--measure``)."""
_VARIABLE: Final = "DLCP_TRAIN_PLAN"


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """What a worker is to do beside running the script.

    Parameters
    ----------
    backend
        Make ``init_process_group`` use DLCP's backend.
    measure_steps
        How many steps to measure, instead of training; 0 trains.
    advise
        Choose settings by what is measured, and try them.
    reports
        The folder where a worker leaves its report; empty: nowhere.
    """

    backend: bool = False
    measure_steps: int = 0
    advise: bool = False
    reports: str = ""

    def as_environment(self) -> dict[str, str]:
        """Return the variable that tells a worker of this plan."""
        return {_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "TrainPlan":
        """Return the plan that the launcher wrote down; without a launcher, the default one."""
        environment = os.environ if environment is None else environment
        return cls(**json.loads(environment.get(_VARIABLE, "{}")))


def report_path(folder: Path, local_rank: int) -> Path:
    """Return where a rank reports: at its place on this machine, for ranks have other numbers after a restart."""
    return folder / f"{local_rank}.json"


def write_report(folder: Path, report: Report) -> None:
    """Write one rank's report, whole or not at all, in the place of any that an earlier start of it has left."""
    path = report_path(folder, report["local_rank"])
    part = path.with_suffix(f".part{os.getpid()}")
    try:
        part.write_text(json.dumps(report))
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def temporary_folder(prefix: str) -> "tempfile.TemporaryDirectory[str]":
    """Return a folder for a context manager; what is left of it in the end is no reason to fail.

    Raises
    ------
    UsageError
        None can be made.
    """
    try:
        return tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
    except OSError as error:
        raise UsageError(f"no temporary folder can be made: {error}; set TMPDIR to a folder with room") from None


def read_reports(folder: Path) -> list[Report]:
    """Return the reports of this machine's ranks as they were last started, by rank."""
    reports = []
    for path in folder.glob("*.json"):
        try:
            reports.append(json.loads(path.read_text()))
        except (OSError, ValueError) as error:
            print(f"dlcp: warning: {path.name} is no report of a rank: {error}", file=sys.stderr)
    return sorted(reports, key=lambda report: int(report["rank"]))


_ONE_MACHINE: Final = ("--standalone", "--local-addr", "127.0.0.1")
"""Options for torchrun when the user gives none about a rendezvous: one machine, and a free port."""
_RENDEZVOUS: Final = ("nnodes", "node-rank", "rdzv", "master", "standalone", "local-addr")
_FRESH_STORE: Final = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Has rank 0 serve a new store at every start. By default torchrun keeps one over restarts, where ranks find what those
have written that were killed: Gloo's ranks then try to connect to these."""
_GLOO_INTERFACE: Final = "GLOO_SOCKET_IFNAME"
_MODULE: Final = ("-m", "--module")
_REFUSED: Final = {
    "--no-python": "DLCP is switched on from within Python",
    "--run-path": "dlcp train runs the script that way already",
}


class UsageError(ValueError):
    """The command line is wrong; the message says how."""


def launch(
    torchrun: Sequence[str], script: Sequence[str], options: Sequence[str], plan: TrainPlan
) -> tuple[int, list[Report]]:
    """Run a script and return its exit status, as a shell would, and the reports of this machine's ranks.

    Parameters
    ----------
    torchrun
        Options of torchrun.
    script
        The script and its arguments; ``-m`` and a module's name will do.
    options
        Options of DLCP, ``NAME=VALUE`` each.
    plan
        What the ranks do beside running the script.

    Raises
    ------
    UsageError
        Something of this cannot be run.
    """
    target = target_of(torchrun, script)
    if importlib.util.find_spec("torch") is None:
        raise UsageError("PyTorch is not installed; pip install 'dlcp[torch]'")
    _set_options(options)
    passed = [word for word in torchrun if word not in _MODULE]
    passed = [*(_by_route(passed) if has_rendezvous(passed) else _ONE_MACHINE), *passed]
    for name, value in _FRESH_STORE.items():
        os.environ.setdefault(name, value)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    status = 0
    with temporary_folder("dlcp-train-") as folder:
        os.environ.update(replace(plan, reports=folder).as_environment())
        try:
            main([*passed, *_worker(), *target])
        except ChildFailedError as error:
            print(error, file=sys.stderr)
            status = _status_of(error)
        except SignalException as signal:  # Ctrl-C, or a scheduler that wants its machine back
            status = 128 + signal.sigval
        return status, read_reports(Path(folder))


def _worker() -> list[str]:
    """Return what torchrun starts for each rank, but for the script."""
    if os.environ.get("PYTHON_EXEC", sys.executable) != sys.executable:
        return ["-m", "dlcp.train.worker"]  # the user chose another Python, which has a path of its own
    # torchrun's own `-m` would look for it in the working directory first.
    return ["--no-python", *python_command("dlcp.train.worker")]


def target_of(torchrun: Sequence[str], script: Sequence[str]) -> list[str]:
    """Return what the ranks run: ``script.py arguments`` or ``-m module arguments``.

    Raises
    ------
    UsageError
        There is no script, or torchrun has an option that cannot be combined with DLCP.
    """
    if not script:
        raise UsageError("no script: dlcp train [options] -- script.py [the script's arguments]")
    for word, why in _REFUSED.items():
        if word in torchrun or word.replace("-", "_").replace("__", "--", 1) in torchrun:
            raise UsageError(f"{word} cannot be used here: {why}")
    if any(word in torchrun for word in _MODULE):
        return ["-m", *script]
    if script[0] == "-m":
        if len(script) == 1:
            raise UsageError("-m without a module's name")
    elif not Path(script[0]).is_file():
        raise UsageError(f"there is no script {script[0]}")
    return list(script)


def has_rendezvous(torchrun: Sequence[str]) -> bool:
    """Say whether the user chose how the machines meet, as an option or as torchrun's ``PET_*`` variables."""
    words = [word.lstrip("-").replace("_", "-") for word in torchrun if word.startswith("--")]
    words += [name[4:].lower().replace("_", "-") for name in os.environ if name.startswith("PET_")]
    return any(word.startswith(_RENDEZVOUS) for word in words)


def _by_route(torchrun: Sequence[str]) -> list[str]:
    """Let torchrun and Gloo take the address that leads to the rendezvous, and not what this host's name leads to.

    What the user has chosen stays. On the machine of the rendezvous its name may lead to loopback, which tells nothing:
    then it is the one interface that leads out, if it is one.
    """
    from torch.distributed.run import get_args_parser

    from dlcp.session.addresses import listening_host, own_place
    from dlcp.session.options import Options

    given, _ = get_args_parser().parse_known_args([*torchrun, "script"])
    # PyTorch's static rendezvous has its host in options of its own.
    host = given.rdzv_endpoint.rpartition(":")[0] or given.rdzv_endpoint or given.master_addr
    try:
        place = own_place(Options(), host)
    except OSError:  # torchrun says what is wrong with it
        return []
    named = listening_host(host) != host
    interface = only_way_out() if named else interface_of(place.address)
    if interface is None:
        return []
    if not interface.loopback:
        os.environ.setdefault(_GLOO_INTERFACE, interface.name)
    return [] if given.local_addr else ["--local-addr", interface.address]


def _set_options(words: Sequence[str]) -> None:
    """Pass ``NAME=VALUE`` words on to the ranks, and refuse here what they would refuse."""
    from dlcp.session.options import Options

    known = configuration.simple_options(Options)
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise UsageError(f"--option takes NAME=VALUE, got {word!r}")
        if name not in known:
            raise UsageError(f"there is no option {name!r}{closest(name, known)}")
        try:
            configuration.parse(Options, name, value, f"--option {name}")
        except ValueError as error:
            raise UsageError(str(error)) from None
        os.environ[configuration.PREFIX + name.upper()] = value
    try:
        configuration.build(Options)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _status_of(error: "ChildFailedError") -> int:
    """Return the exit status of the first process that failed, as a shell would."""
    _, failure = error.get_first_failure()
    return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
