# SPDX-License-Identifier: Apache-2.0
"""Run an unchanged training script under torchrun, with DLCP switched on from within each rank.

The launcher passes its task to the ranks in an environment variable; they write their reports to files.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from dlcp.host.interfaces import interface_of, only_way_out
from dlcp.host.ip import loopback
from dlcp.host.processes import python_command
from dlcp.inputs import configuration
from dlcp.inputs.addresses import format_host, parse_address
from dlcp.inputs.error_text import closest

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

Report = dict[str, Any]
"""``rank``, ``local_rank``, ``ranks``, ``local_ranks`` (number of ranks of this machine), ``restarts`` (number of times
torchrun has restarted them), ``final`` (False for a note taken while the script ran), ``error`` (text, or None),
``failed_at_s`` (by ``time.time``; None if it did not fail, or the time is unknown), ``stopped_by`` (added by the
launcher: the signal that ended ``dlcp train`` and its ranks, or None), ``traceback`` (of its exception, or ""), ``log``
(torchrun's file of its standard error, or ""), ``backend`` (None without ``--backend``), ``models`` (a list), and
``measured`` (None without ``--measure``)."""
_VARIABLE: Final = "DLCP_TRAIN_TASK"


@dataclass(frozen=True, slots=True)
class WorkerTask:
    """A worker's task beyond running the script.

    Parameters
    ----------
    backend
        Make ``init_process_group`` use DLCP's backend.
    watch_only
        Leave averaging to the framework, and only compare the ranks.
    measure_steps
        Number of steps to measure, instead of training; 0 trains.
    reports
        Folder for the worker's report; empty for no report.
    """

    backend: bool = False
    watch_only: bool = False
    measure_steps: int = 0
    reports: str = ""

    def as_environment(self) -> dict[str, str]:
        """Return the environment variable that passes this task to a worker."""
        return {_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "WorkerTask":
        """Return the launcher's task; without a launcher, the default one."""
        environment = os.environ if environment is None else environment
        return cls(**json.loads(environment.get(_VARIABLE, "{}")))


def report_path(folder: Path, local_rank: int) -> Path:
    """Return the path of a rank's report, by its local rank, because ranks may change in a restart."""
    return folder / f"{local_rank}.json"


def write_report(folder: Path, report: Report) -> None:
    """Write one rank's report atomically; it replaces that of an earlier start."""
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
    """Return a temporary folder, as a context manager that ignores errors when it removes the folder.

    Raises
    ------
    UsageError
        The folder cannot be created.
    """
    try:
        return tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
    except OSError as error:
        raise UsageError(f"cannot create a temporary folder: {error}; set TMPDIR to a folder with free space") from None


def read_reports(folder: Path) -> list[Report]:
    """Return the latest reports of this machine's ranks, by rank; warn of unreadable ones."""
    reports = []
    for path in folder.glob("*.json"):
        try:
            reports.append(json.loads(path.read_text()))
        except (OSError, ValueError) as error:
            print(f"dlcp: warning: cannot read a rank's report, {path.name}: {error}", file=sys.stderr)
    return sorted(reports, key=lambda report: int(report["rank"]))


_RENDEZVOUS: Final = ("nnodes", "node-rank", "rdzv", "master", "standalone", "local-addr")
_FRESH_STORE: Final = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Makes rank 0 serve a new store at every start. By default torchrun keeps one store over restarts, and Gloo's ranks
then try to connect to killed ranks whose entries they find there."""
_RENDEZVOUS_PORT: Final = 29400
"""That of torchrun, for an endpoint without one."""
_ANSWER_S: Final = 1.0
"""This machine answers itself at once."""
_GLOO_INTERFACE: Final = "GLOO_SOCKET_IFNAME"
_REFUSED: Final = {
    "no_python": "DLCP is switched on from within Python",
    "run_path": "dlcp train runs the script that way already",
}


_BROKEN_CONNECTION: Final = re.compile(r"closed by peer|reset by peer|remote worker|rank \d+ (gave up|has left)")
"""In the errors of Gloo and DLCP when another rank has left; NCCL waits for its timeout."""


class UsageError(ValueError):
    """The command line is wrong; the message says what to change."""


def launch(
    torchrun: Sequence[str], script: Sequence[str], options: Sequence[str], task: WorkerTask
) -> tuple[int, list[Report]]:
    """Run a script; return its exit status, as a shell would, and the reports of this machine's ranks.

    Parameters
    ----------
    torchrun
        Options of torchrun.
    script
        The script, or ``-m`` and a module, and its arguments.
    options
        Options of DLCP, as ``NAME=VALUE``.
    task
        The ranks' task beyond running the script.

    Raises
    ------
    UsageError
        The arguments are invalid, PyTorch is missing, or the machines did not meet.
    """
    check_torch()
    settings = torchrun_settings(torchrun, script)
    set_options(options)
    for name, value in _FRESH_STORE.items():
        os.environ.setdefault(name, value)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError
    from torch.distributed.run import run

    status, failed, stopped_by, lost = 0, None, None, None
    with temporary_folder("dlcp-train-") as folder:
        os.environ.update(replace(task, reports=folder).as_environment())
        try:
            record(run)(settings)
        except ChildFailedError as error:
            failed = error
        except (RendezvousConnectionError, RendezvousTimeoutError) as error:
            status, lost = 1, error
        except SignalException as caught:  # Ctrl-C, or a scheduler's signal
            status, stopped_by = 128 + caught.sigval, caught.sigval.name
        reports = read_reports(Path(folder))
    if lost:
        if not reports:
            raise UsageError(
                f"the machines did not meet at {_endpoint(settings)}: {lost} Start the job on all of them with the "
                "same endpoint, open its TCP port, and allow more time, if needed, with --rdzv-conf "
                "read_timeout=600,join_timeout=1200"
            )
        print(f"dlcp train: lost the rendezvous at {_endpoint(settings)}: {lost}", file=sys.stderr)
    _note_ends(reports, failed.failures if failed else {}, stopped_by)
    if failed is None:
        return status, reports
    order = [report["rank"] for report in failures(reports)]
    if not order:
        print(failed, file=sys.stderr)  # the ranks ended before DLCP was imported
    ended = [failed.failures[rank].exitcode for rank in order if rank in failed.failures]
    _, first_seen = failed.get_first_failure()
    # torchrun may stop a rank that has failed and is still cleaning up.
    code = next((code for code in ended if code != -signal.SIGTERM), first_seen.exitcode)
    return code if code > 0 else 128 - code, reports


def failures(reports: Sequence[Report]) -> list[Report]:
    """Return the reports of ranks that failed, in the order in which they did.

    Those whose connection to another rank broke come after all others, whatever the time: a script that fails may close
    its process group, and so its connections, before its error reaches the worker. Those that torchrun stopped are
    the last.
    """

    def order(report: Report) -> tuple[bool, bool, float]:
        at_s = report["failed_at_s"]
        return at_s is None, bool(_BROKEN_CONNECTION.search(report["error"])), at_s or 0.0

    return sorted((report for report in reports if report["error"]), key=order)


def _note_ends(reports: Sequence[Report], failed: Mapping[int, "ProcessFailure"], stopped_by: str | None) -> None:
    """Add to the reports how processes ended that could not report it themselves, as far as torchrun knows.

    Parameters
    ----------
    failed
        Failed processes, by rank. The first one failed first: torchrun stops the others then, with SIGTERM.
    stopped_by
        The signal that ended the launcher; None if none did.
    """
    first = next(iter(failed), None)
    for report in reports:
        report["stopped_by"] = stopped_by
        rank, code = report["rank"], failed[report["rank"]].exitcode if report["rank"] in failed else 0
        if code < 0 and code != -signal.SIGTERM:  # before the errors of ranks whose connection to this one broke
            hint = ", as when memory runs out" if code == -signal.SIGKILL else ""
            report.update(error=f"{failed[rank].signal_name()}{hint}", failed_at_s=0.0)
        elif report["final"]:
            continue
        elif code:
            error = f"exit status {code}" if code > 0 else "SIGTERM" if rank == first else "torchrun's SIGTERM"
            report.update(error=error, failed_at_s=0.0 if rank == first else None)
        elif stopped_by or failed:  # otherwise it ended with status 0, by os._exit
            report.update(error=f"the {stopped_by} of dlcp train" if stopped_by else "torchrun's SIGTERM")


def check_torch() -> None:
    """Raise UsageError if PyTorch is missing, before ranks start that would each fail."""
    if importlib.util.find_spec("torch") is None:
        raise UsageError("PyTorch is not installed: pip install 'dlcp[torch]'")


def torchrun_settings(torchrun: Sequence[str], script: Sequence[str]) -> argparse.Namespace:
    """Return torchrun's settings for running a script in workers.

    The script's own arguments do not pass through torchrun's parser: it would refuse those that begin like several of
    its options.

    Raises
    ------
    UsageError
        There is no script, or an option of torchrun is invalid or cannot be combined with DLCP.
    """
    from torch.distributed.run import config_from_args

    chosen = has_rendezvous(torchrun)  # else: one machine, and a free port
    try:
        settings = _parsed(torchrun if chosen else ["--standalone", "--local-addr", loopback(), *torchrun])
    except UsageError:
        target_of(script)  # if there is no script, this error explains it better
        raise
    if chosen:
        _use_route(settings)
    for name, why in _REFUSED.items():
        if getattr(settings, name):
            raise UsageError(f"--{name.replace('_', '-')} cannot be used here: {why}")
    target = target_of(script, is_module=settings.module)
    settings.module, settings.no_python = False, True
    settings.training_script, *settings.training_script_args = [*_worker(), *target]
    try:
        config_from_args(settings)
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"torchrun: {error}") from None
    return settings


def _parsed(torchrun: Sequence[str]) -> argparse.Namespace:
    """Parse torchrun's options; raise UsageError, without torchrun's usage, which has no script of DLCP's."""
    from torch.distributed.run import get_args_parser

    def refuse(message: str) -> NoReturn:
        raise UsageError(f"torchrun: {message}; `torchrun --help` lists its options")

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    return parser.parse_args([*torchrun, "--", "script"])


def _worker() -> list[str]:
    """Return the command line of a worker, to which the script and its arguments are added."""
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    if python != sys.executable:  # the user chose another Python, which has its own sys.path
        return [python, "-u", "-m", "dlcp.train.worker"]
    # torchrun's own `-m` would search the working directory first.
    return python_command("dlcp.train.worker")


def target_of(script: Sequence[str], *, is_module: bool = False) -> list[str]:
    """Return the ranks' script and its arguments: ``script.py arguments`` or ``-m module arguments``.

    Raises
    ------
    UsageError
        There is no script or no module.
    """
    if script[:1] == ["-m"]:
        is_module, script = True, script[2 if script[1:2] == ["--"] else 1 :]
        if not script or script[0].startswith("-"):
            raise UsageError("-m without a module's name: dlcp train [options] -m module [arguments]")
    if not script:
        raise UsageError("no script: dlcp train [options] script.py [the script's arguments]")
    if is_module:
        return ["-m", *script]
    if not Path(script[0]).is_file():
        raise UsageError(f"there is no script {script[0]}; give a file, or -m and a module, after torchrun's options")
    return list(script)


def has_rendezvous(torchrun: Sequence[str]) -> bool:
    """Return whether the user chose a rendezvous, by an option or by torchrun's ``PET_*`` variables."""
    words = [word.lstrip("-").replace("_", "-") for word in torchrun if word.startswith("--")]
    words += [name[4:].lower().replace("_", "-") for name in os.environ if name.startswith("PET_")]
    return any(word.startswith(_RENDEZVOUS) for word in words)


def _use_route(settings: argparse.Namespace) -> None:
    """Make torchrun and Gloo use the address that routes to the rendezvous, instead of the one of this host's name.

    Sets torchrun's ``local_addr`` and Gloo's environment variable. Does not override the user's choice. On the machine
    of the rendezvous its name may resolve to loopback; the address is then that of the only interface with a route out,
    if there is exactly one.
    """
    from dlcp.session.addresses import listening_host, own_place  # loads the transport, which --help does not need
    from dlcp.session.options import Options

    try:
        host, port = parse_address(_endpoint(settings), 0)
        place = own_place(Options(bind=""), (host, port))
    except (OSError, ValueError):  # torchrun reports this error
        return
    _serve_store(settings, host, port)
    named = listening_host(host) != host
    interface = only_way_out() if named else interface_of(place.address)
    if interface is None:
        return
    if not interface.loopback:
        os.environ.setdefault(_GLOO_INTERFACE, interface.name)
    settings.local_addr = settings.local_addr or interface.address


def _endpoint(settings: argparse.Namespace) -> str:
    # PyTorch's static rendezvous has separate options for its host.
    return str(settings.rdzv_endpoint or format_host(settings.master_addr))


def _serve_store(settings: argparse.Namespace, host: str, port: int) -> None:
    """Make torchrun serve its store if the rendezvous is at an address of this machine.

    By itself, torchrun compares the address with those of this host's name, which is often 127.0.1.1 alone: then no
    machine serves, and all wait for each other. Overrides neither the user's choice nor another launcher that serves.
    Where torchrun finds out by itself, it also becomes a client if another launcher serves first.
    """
    if settings.rdzv_backend != "c10d" or "is_host" in settings.rdzv_conf or _torchrun_serves(host):
        return
    found = {str(info[4][0]) for info in socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)}
    own = [interface for address in found if (interface := interface_of(address)) and not interface.loopback]
    if own and not _is_served(host, port or _RENDEZVOUS_PORT):
        settings.rdzv_conf = ",".join(filter(None, [settings.rdzv_conf, "is_host=1"]))


def _torchrun_serves(host: str) -> bool:
    from torch.distributed.elastic.rendezvous import utils

    try:
        return bool(utils._matches_machine_hostname(host))
    except OSError:  # this host's name has no address
        return False


def _is_served(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_ANSWER_S).close()
    except OSError:
        return False
    return True


def set_options(words: Sequence[str]) -> None:
    """Pass ``NAME=VALUE`` options to the ranks through the environment; check them as the ranks do."""
    from dlcp.session.options import Options  # loads the transport, which --help does not need

    known = configuration.options_of(Options)
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise UsageError(f"--option takes NAME=VALUE, got {word!r}")
        if name not in known:
            raise UsageError(f"there is no option {name!r}{closest(name, known)}")
        try:
            known[name].parse(f"--option {name}", value)
        except ValueError as error:
            raise UsageError(str(error)) from None
        os.environ[configuration.PREFIX + name.upper()] = value
    try:
        Options()
    except ValueError as error:
        text = str(error)
        for name in {word.partition("=")[0] for word in words}:
            text = re.sub(rf"\b{configuration.PREFIX}{name.upper()}\b", f"--option {name}", text)
        raise UsageError(text) from None
