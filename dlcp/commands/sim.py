# SPDX-License-Identifier: Apache-2.0
"""``dlcp sim``: run experiments, compare and report them."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from dlcp.commands import sim_new
from dlcp.commands.common import (
    add,
    add_json,
    add_model_input,
    add_out,
    check_folder,
    check_writable,
    model_input,
    own_experiments,
    real,
    refuse,
    whole,
)
from dlcp.inputs.configuration import Range
from dlcp.inputs.error_text import nearest

_OUT: Final = Path("out/sim")
_TRACE_FIELDS: Final = (
    *("ranks", "ranks_per_node", "repeat", "transport", "collective", "compute_factor", "flops", "eager_bytes"),
)
"""Options of a trace that are fields of its job."""
_TABLE_KINDS: Final[dict[Literal["csv", "parquet"], str]] = {"csv": "CSV", "parquet": "Parquet"}
"""Options that name a folder for tables, and the names of their formats."""


class SimUsageError(ValueError):
    """A command line that cannot be carried out; the message says what to change."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``dlcp sim``."""
    commands = parser.add_subparsers(metavar="ACTION", required=True)
    new = commands.add_parser("new", help="ask for a job and its network, and write an experiment file that runs")
    sim_new.add_arguments(new)
    new.set_defaults(action=sim_new.run)
    single = commands.add_parser("run", help="run one combination of an experiment's points and print its numbers")
    _files(single, 1)
    _point(single)
    _results(single)
    single.set_defaults(action=_run)
    play = commands.add_parser("play", help="simulate one step of a job and write a page that plays it")
    _files(play, 1)
    _point(play)
    add(play, "--job", "NAME", str, "the job (default: the first)")
    add(play, "--step", "N", whole(0), "the step, from 0 (default: the last)")
    add(play, "--output", "FILE", Path, "page to write", default=Path("step.html"))
    play.set_defaults(action=_play)
    several = commands.add_parser("sweep", help="run all combinations that have no results yet")
    _files(several, "*", "required")
    add_out(several, _OUT)
    _where(several)
    several.set_defaults(action=_sweep)
    report = commands.add_parser("report", help="write report.html, summary.json and the plots of all results")
    _files(report, "*")
    add_out(report, _OUT)
    report.set_defaults(action=_report)
    everything = commands.add_parser("all", help="sweep, then report")
    _files(everything, "*")
    add_out(everything, _OUT)
    _where(everything)
    everything.set_defaults(action=_all)
    compare = commands.add_parser("compare", help="print how the numbers of two runs differ, and which is better")
    compare.description = (
        "Experiments are simulated. Of results that were saved, the exit status is 1 if any number differs."
    )
    sides = "experiment, result file, or folder of a sweep"
    compare.add_argument("old", metavar="A", help=sides)
    compare.add_argument("new", metavar="B", help="another of the same kind")
    add(compare, "--above", "PERCENT", real(Range(0.0, 1e6)), "show numbers that differ by more", default=0.5)
    add(compare, "--page", "FILE", Path, "also write a page with plots, of two experiments or two files")
    compare.set_defaults(action=_compare)
    profile = commands.add_parser("profile", help="measure a PyTorch model of your own, layer by layer")
    profile.add_argument("factory", metavar="MODULE:FUNCTION", help="function that returns the model")
    add(profile, "--batch", "N", whole(1), "samples in a step", default=32)
    add_model_input(profile)
    profile.add_argument("--device", default="cpu", help="where to measure (default: cpu)")
    add(profile, "--output", "FILE", Path, "YAML file to write (default: only print the layers)")
    profile.set_defaults(action=_profile)
    imported = commands.add_parser("import", help="check a trace, and write an experiment file that runs it")
    _trace(imported)
    add(imported, "--output", "FILE", Path, "YAML file to write (default: only check the trace)")
    imported.set_defaults(action=_import)
    replay = commands.add_parser("replay", help="simulate a trace on a network and print its numbers")
    _trace(replay)
    _results(replay)
    replay.set_defaults(action=_replay)
    export = commands.add_parser("export", help="write a job of an experiment as a GOAL or Chakra trace")
    _files(export, 1)
    _point(export)
    add(export, "--job", "NAME", str, "the job (default: the only one)")
    add(export, "--output", "FILE", Path, "NAME.goal, or NAME.et for NAME.RANK.et", required=True)
    export.set_defaults(action=_export)
    listed = commands.add_parser("list", help="name the experiments that come with DLCP")
    add_json(listed)
    listed.set_defaults(action=_list)


def run(arguments: argparse.Namespace) -> int:
    """Run one of the actions and return the exit status."""
    from dlcp.inputs.document import DocumentError, PlaceError
    from dlcp.sim.limits import SimulatorError

    action: Callable[[argparse.Namespace], int] = arguments.action
    try:
        return action(arguments)
    except (SimUsageError, DocumentError, PlaceError, SimulatorError) as error:
        return refuse("sim", error)
    except MemoryError as error:
        return refuse("sim", f"out of memory: {error}; finished runs are kept", 1)
    except KeyboardInterrupt:
        return refuse("sim", "interrupted; finished runs are kept, and the same command continues from there", 130)


def experiment_files(names: Sequence[str]) -> list[Path]:
    """Return the files of experiments, given by path or by the name of one of DLCP's own; by default all of DLCP's own.

    Raises
    ------
    SimUsageError
        There is no such file.
    """
    own = own_experiments()
    found = []
    for name in names or list(own):
        path = own.get(name, Path(name))
        if not path.is_file():
            raise SimUsageError(f"there is no experiment {name!r} and no such file{nearest(name, own)}")
        found.append(path)
    return found


def _files(parser: argparse.ArgumentParser, nargs: int | str, default: str = "default: all of these") -> None:
    words = "experiment: a file, or the name of one that comes with DLCP"
    default = f" ({default})" if nargs == "*" else ""
    parser.add_argument("experiments", metavar="FILE", nargs=nargs, help=words + default)
    parser.add_argument("--quick", action="store_true", help="run only the quick selection of each experiment")
    add(parser, "--seed", "N", whole(0), "seed, instead of the file's; may be repeated", action="append")
    choices = ("packets", "flows")
    words = "what to simulate: packets, or flows, which approximate many thousand hosts (default: the file's)"
    parser.add_argument("--engine", choices=choices, help=words)


def _point(parser: argparse.ArgumentParser) -> None:
    words = "choose a point of an axis (default: each axis' first)"
    add(parser, "--point", "AXIS=NAME", str, words, action="append", default=[])


def _trace(parser: argparse.ArgumentParser) -> None:
    trace = "GOAL, Chakra (NAME.0.et), `dlcp train --trace`, or PyTorch's profile (or a folder of them)"
    parser.add_argument("trace", metavar="TRACE", help=trace)
    add(parser, "--ranks", "N", whole(1), "ranks, if a file of one rank stands for all")
    within = "ranks of a node: only traffic between nodes crosses the network (default: 1)"
    add(parser, "--ranks-per-node", "N", whole(1), within, default=1)
    add(parser, "--repeat", "N", whole(1), "how often the job runs", default=1)
    # Their choices are those of dlcp.sim, which takes a while to load.
    fabrics = "star, leaf_spine, fat_tree, dragonfly or rail_optimised, or a file of hosts, switches and links"
    add(parser, "--topology", "KIND", str, fabrics, default="star")
    rate = "rate of the hosts' links, which a file of links has itself (default: 100)"
    add(parser, "--rate-gbps", "RATE", real(Range(0.0, 10_000, above=True)), rate)
    add(parser, "--delay-us", "TIME", real(Range(0.0, 1e6)), "delay of a link, likewise (default: 1)")
    kinds = "dctcp, cubic, new_reno, swift, dlcp, pias, pfabric, ndp, nscc or rccc, with the switches that suit it"
    add(parser, "--transport", "KIND", str, kinds, default="dctcp")
    add(parser, "--collective", "NAME", str, "all-reduces: ring, direct or tree (default: by the trace)")
    faster = "factor on the durations of computations: 0.5 is a processor that is twice as fast"
    add(parser, "--compute-factor", "X", real(Range(0.0, 1000.0)), faster, default=1.0)
    add(parser, "--flops", "RATE", real(Range(0.0, 1e30, above=True)), "operations a second, for Chakra's num_ops")
    eager = "largest message whose sender does not wait for the receiver (default: 65535 for GOAL, else no limit)"
    add(parser, "--eager-bytes", "N", whole(0), eager)
    add(parser, "--groups", "FILE", Path, "JSON with the ranks of Chakra's process groups by name")
    add(parser, "--seed", "N", whole(0), "seed of everything", default=1)


def _results(parser: argparse.ArgumentParser) -> None:
    add(parser, "--output", "FILE", Path, "also write the results to a file")
    tables = "also write tables of steps, ranks, messages, links and counts over time, as {} files"
    for kind, name in _TABLE_KINDS.items():
        add(parser, f"--{kind}", "FOLDER", Path, tables.format(name))


def _where(parser: argparse.ArgumentParser) -> None:
    add(parser, "--processes", "N", whole(1, 10_000), "runs at the same time (default: one per core)")
    add(parser, "--dask", "ADDRESS", str, "address of a Dask scheduler whose workers run them instead")


def _run(arguments: argparse.Namespace) -> int:
    chosen, title = _chosen(arguments)
    return _simulate(chosen, arguments, title)


def _play(arguments: argparse.Namespace) -> int:
    import msgspec

    from dlcp.sim.tools.playback import StepRecorder, playback_page, step_playback

    chosen, title = _chosen(arguments)
    _check_output(check_writable, "--output", arguments.output)
    recorder = StepRecorder(arguments.job, arguments.step)
    # Otherwise the recorded step might be skipped.
    setting = msgspec.structs.replace(chosen.setting, skip_steady=0.0)
    document = _watched_run(msgspec.structs.replace(chosen, setting=setting), recorder)
    if not document["complete"]:
        return _refuse_incomplete(document)
    point = ", ".join(f"{axis} {name}" for axis, name in chosen.point.items())
    page = playback_page(step_playback(recorder), ": ".join(filter(None, (title, point))))
    arguments.output.write_text(page, encoding="utf-8")
    print(f"{arguments.output}: step {recorder.step} of {recorder.job.name}; open it in a browser")
    return 0


def _chosen(arguments: argparse.Namespace) -> tuple[Any, str]:
    """Return the run that ``--point`` chooses, and the experiment's title."""
    from dlcp.sim.experiments.experiment import read

    path = experiment_files(arguments.experiments)[0]
    described = read(path, quick=arguments.quick, seeds=arguments.seed or (), engine=arguments.engine)
    wanted = dict(_pair(text) for text in arguments.point)
    axes = {axis.name: [point.name for point in axis.points] for axis in described.experiment.axes}
    for axis, name in wanted.items():
        if axis not in axes:
            raise SimUsageError(f"--point: there is no axis {axis!r}{nearest(axis, axes)}")
        if name not in axes[axis]:
            raise SimUsageError(f"--point: axis {axis} has no point {name!r}{nearest(name, axes[axis])}")
    fitting = [item for item in described.runs if all(item.point[axis] == name for axis, name in wanted.items())]
    if not fitting:
        raise SimUsageError(f"{path}: the quick selection has no such combination; leave --quick out")
    return fitting[0], described.experiment.title


def _simulate(item: Any, arguments: argparse.Namespace, title: str) -> int:
    """Run an experiment's run, print its numbers and write its results."""
    from dlcp.sim.experiments.running import write
    from dlcp.sim.tools.result_tables import TableRecorder, table_writer, write_tables

    output: Path | None = arguments.output
    folders = {kind: folder for kind in _TABLE_KINDS if (folder := getattr(arguments, kind))}
    for kind, folder in folders.items():
        table_writer(kind)
        _check_output(check_folder, f"--{kind}", folder)
    if folders and item.setting.skip_steady:
        raise SimUsageError("tables are of simulated steps, and `skip_steady` skips some: leave out one of the two")
    if output is not None:
        if output.is_file() or not output.exists():  # it is first written to another file next to it
            _check_output(check_folder, "--output", output.parent)
        _check_output(check_writable, "--output", output)
    recorder = TableRecorder() if folders else None
    document = _watched_run(item, recorder)
    print(", ".join(f"{axis} {name}" for axis, name in item.point.items()) or title)
    if document["engine"] == "flows":
        print("  approximate: simulated as flows, not packets")
    if skipped := sum(job.get("skipped_steps", 0) for job in document["jobs"]):
        print(f"  approximate: {skipped:,} of {sum(len(job['step_s']) for job in document['jobs']):,} steps skipped")
    for note in filter(None, (job.get("note") for job in document["jobs"])):
        print(f"  simplified: {note}")
    width = max(map(len, document["metrics"]), default=0)
    for name, value in document["metrics"].items():
        print(f"  {name:{width}} {value:.6g}")
    if output is not None:
        write(document, output)
    if recorder is not None:
        tables = recorder.tables()
        for kind, folder in folders.items():
            print("\n".join(map(str, write_tables(tables, folder, kind))))
    return 0 if document["complete"] else _refuse_incomplete(document)


def _refuse_incomplete(document: dict[str, Any]) -> int:
    """Print how far a run came that did not end; return the exit status."""
    status = 130 if document["ended"] == "interrupted" else 1
    return refuse("sim", f"the run is incomplete: {document['unfinished']}", status)


def _check_output(check: Callable[[str, Path], None], flag: str, path: Path | None) -> None:
    """Raise SimUsageError if a file or folder for results cannot be written, before they are computed."""
    try:
        if path is not None:
            check(flag, path)
    except ValueError as error:
        raise SimUsageError(str(error)) from None


def _watched_run(item: Any, recorder: Any = None) -> dict[str, Any]:
    """Run an experiment's run, with progress at a terminal; return its results."""
    from dlcp.sim.experiments.progress import ProgressBar
    from dlcp.sim.experiments.running import run as run_one

    with ProgressBar("simulating") as bar:
        return run_one(item, on_progress=bar.update if bar.shown else None, recorder=recorder)


def _traced(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Return the traced job and the network that a command line describes."""
    from dlcp.inputs.document import PlaceError, converted, read_json
    from dlcp.sim.experiments.fitted_network import FABRICS, TRANSPORT_KINDS, FittedNetwork
    from dlcp.sim.network.nodes import LinkSpec
    from dlcp.sim.scenario import TraceJob

    fabric = arguments.topology
    from_file = fabric not in FABRICS and Path(fabric).is_file()
    links = {name: value for name in ("rate_gbps", "delay_us") if (value := getattr(arguments, name)) is not None}
    for flag, value, known in (
        ("--topology", fabric, [fabric] if from_file else FABRICS),
        ("--transport", arguments.transport, TRANSPORT_KINDS),
        ("--collective", arguments.collective or "ring", ("ring", "direct", "tree")),
    ):
        if value not in known:
            raise SimUsageError(f"{flag}: there is no {value!r}{nearest(value, known)}")
    if from_file and links:
        given = " and ".join(f"--{name.replace('_', '-')}" for name in links)
        raise SimUsageError(f"--topology: the links of {fabric} have their own rates and delays; leave {given} out")
    groups = read_json(arguments.groups) if arguments.groups else {}
    options = {name: getattr(arguments, name) for name in _TRACE_FIELDS}
    try:
        job = converted({"name": "trace", "file": arguments.trace, "groups": groups, **options}, TraceJob)
        converted(links, LinkSpec)
    except PlaceError as error:
        name, *place = map(str, error.steps)
        where = ".".join((str(arguments.groups), *place)) if name == "groups" else f"--{name.replace('_', '-')}"
        raise SimUsageError(f"{where}: {error}") from None
    network = FittedNetwork(fabric, transport=arguments.transport, **links)
    return job, network


def _import(arguments: argparse.Namespace) -> int:
    from dlcp.sim.experiments.trace_experiment import summary, trace_experiment, write_experiment
    from dlcp.sim.traces.traced_jobs import read_trace

    job, network = _traced(arguments)
    workload = read_trace(job)
    print(f"{arguments.trace}: {summary(workload)}")
    if workload.note:
        print(f"  simplified: {workload.note}")
    if arguments.output is None:
        return 0
    _check_output(check_writable, "--output", arguments.output)
    write_experiment(trace_experiment(job, network, arguments.seed), arguments.output)
    print(f"{arguments.output}: run it with `dlcp sim run {arguments.output}`")
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    from dlcp.sim.experiments.trace_experiment import summary, trace_run
    from dlcp.sim.limits import LimitError
    from dlcp.sim.traces.traced_jobs import read_trace

    more = "`dlcp sim import --output FILE` writes an experiment, where these settings can be changed"

    job, network = _traced(arguments)
    run_item = trace_run(job, network, arguments.seed)
    try:
        status = _simulate(run_item, arguments, f"{arguments.trace}: {summary(read_trace(job))}")
    except LimitError as error:
        raise SimUsageError(f"{error}; {more}") from None
    if status == 1:
        print(f"  {more}", file=sys.stderr)
    return status


def _export(arguments: argparse.Namespace) -> int:
    from dlcp.sim.experiments.trace_experiment import job_graph, write_trace

    item, _ = _chosen(arguments)
    try:
        files = write_trace(job_graph(item.setting, arguments.job), arguments.output)
    except (ValueError, OSError) as error:
        raise SimUsageError(str(error)) from None
    more = f" to {files[-1]}" if len(files) > 1 else ""
    print(f"{files[0]}{more}: the job as a trace; `dlcp sim replay {files[0]}` runs it")
    return 0


def _pair(text: str) -> tuple[str, str]:
    axis, equals, name = text.partition("=")
    if not equals:
        raise SimUsageError(f"--point takes AXIS=NAME, got {text!r}")
    return axis, name


def _read_all(arguments: argparse.Namespace) -> list[Any]:
    from dlcp.sim.experiments.experiment import read

    paths = experiment_files(arguments.experiments)
    described = [
        read(path, quick=arguments.quick, seeds=arguments.seed or (), engine=arguments.engine) for path in paths
    ]
    return described if arguments.experiments else list(filter(_can_run, described))


def _can_run(described: Any) -> bool:
    """Return whether an experiment's packages are installed; if not, print which are missing."""
    from dlcp.sim.jobs.learning import LearningError, check_installed

    if not any(job.learn for item in described.runs for job in item.setting.training):
        return True
    try:
        check_installed()
    except LearningError as error:
        print(f"{described.experiment.name} is left out: {error}", file=sys.stderr)
        return False
    return True


def _sweep(arguments: argparse.Namespace) -> int:
    if not arguments.experiments:
        raise SimUsageError(
            f"sweep: name experiments, of {', '.join(own_experiments())}, or files; `dlcp sim all` runs all of these"
        )
    return _run_all(arguments)


def _run_all(arguments: argparse.Namespace) -> int:
    from dlcp.sim.experiments.sweep import default_processes, existing, sweep

    # Read all before the first run, so that errors in the last file do not appear after hours.
    described = _read_all(arguments)
    incomplete = 0
    for item in described:
        if arguments.quick and item.experiment.quick.skip:
            continue
        print(item.experiment.title, file=sys.stderr)
        folder = arguments.out / item.experiment.name
        sweep(item.runs, folder, processes=arguments.processes or default_processes(), dask=arguments.dask)
        incomplete += sum(existing(folder, each) is None for each in item.runs)
    return refuse("sim", f"{incomplete} runs are incomplete, as said above", 1) if incomplete else 0


def _report(arguments: argparse.Namespace) -> int:
    from dlcp.sim.tools.report import write_report

    described = _read_all(arguments)
    kept = [item for item in described if not (arguments.quick and item.experiment.quick.skip)]
    page, unfinished = write_report(kept, arguments.out)
    print(page)
    for name, sentence in unfinished.items():
        refuse("sim", f"{name} is incomplete, and left out: {sentence}")
    return 1 if unfinished else 0


def _all(arguments: argparse.Namespace) -> int:
    from dlcp.sim.experiments.results import ReportError

    status = _run_all(arguments)
    try:
        return _report(arguments) or status
    except ReportError as error:
        return refuse("sim", error, status or 2)


def _compare(arguments: argparse.Namespace) -> int:
    from dlcp.sim.tools.comparison import common_results, comparison_page, differences, read_result, table_lines

    sides, above = (Path(arguments.old), Path(arguments.new)), arguments.above / 100
    are_folders = all(side.is_dir() for side in sides)
    _check_output(check_writable, "--page", arguments.page)
    if arguments.page and are_folders:
        raise SimUsageError("--page shows two runs; give two experiments or two result files")
    if are_folders:
        pairs = [(name, read_result(old), read_result(new)) for name, old, new in common_results(*sides)]
    else:
        runs = [_compared_run(str(side)) for side in (arguments.old, arguments.new)]
        pairs = [(f"A: {arguments.old}\nB: {arguments.new}", runs[0], runs[1])]
    count = incomplete = 0
    for name, old, new in pairs:
        for side, shown in (("A", old), ("B", new)):
            if shown.unfinished:
                where = f"{name}: {side}" if are_folders else side
                incomplete = refuse("sim", f"{where} is incomplete: {shown.unfinished}", 1)
        found = differences(old, new, above)
        count += len(found)
        if found:
            print("\n".join([name, *table_lines(found)]))
    compared = f"{len(pairs)} results compared" if are_folders else "2 runs compared"
    print(f"{compared}, {count} numbers differ by more than {above:.3%}")
    if arguments.page:
        page = comparison_page((arguments.old, arguments.new), *pairs[0][1:], above)
        arguments.page.write_text(page, encoding="utf-8")
        print(arguments.page)
    return 1 if incomplete or (count and (are_folders or all(map(_is_saved, sides)))) else 0


def _is_saved(side: Path) -> bool:
    """Return whether a side of a comparison is a result file; otherwise it is an experiment."""
    return side.suffix == ".json" or (side.exists() and side.suffix not in (".yaml", ".yml"))


def _compared_run(name: str) -> Any:
    """Return a result file's run, or that of an experiment's first points."""
    import msgspec

    from dlcp.sim.experiments.experiment import read
    from dlcp.sim.tools.comparison import ComparedRun, read_result

    if _is_saved(Path(name)):
        return read_result(Path(name))
    (path,) = experiment_files([name])
    return msgspec.convert(_watched_run(read(path).runs[0]), ComparedRun)


def _profile(arguments: argparse.Namespace) -> int:
    from dlcp.sim.jobs.models import measured_profile, write_profile

    _check_output(check_writable, "--output", arguments.output)
    try:
        given = model_input(arguments, arguments.batch)
    except ValueError as error:
        raise SimUsageError(str(error)) from None
    profile = measured_profile(arguments.factory, given, arguments.device)
    if arguments.output is not None:
        write_profile(profile, arguments.output)
        print(f"{arguments.output}: ", end="")
    else:
        for layer in profile.layers:
            seconds = f"{layer.forward_s * 1e3:9.2f} ms forward {layer.backward_s * 1e3:9.2f} ms backward"
            print(f"{layer.name:40} {layer.parameters:13,} parameters {seconds}")
    print(f"{len(profile.layers)} layers, {profile.parameters:,} parameters, {profile.compute_s * 1e3:.1f} ms a step")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from dlcp.sim.experiments.experiment import read

    found = [
        {"name": path.stem, "runs": len(each.runs), "title": each.experiment.title, "file": str(path)}
        for path in experiment_files([])
        for each in [read(path)]
    ]
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(f"{each['name']:20} {each['runs']:4} runs  {each['title']}" for each in found))
    return 0
