# SPDX-License-Identifier: Apache-2.0
"""Which files take part in one simulated experiment, from its file to its plots, and in one simulated packet.

Run ``python -m tests.architecture.simulated_walk`` to see them, in the order in which they are entered.
"""

import io
import sys
import tempfile
import types
from contextlib import contextmanager
from pathlib import Path

from tests.architecture.walk import ROOT
from tests.sim.experiments_small import write_experiment

ENGINES = "sim/engines/"
"""Where packets move: the second walk goes there."""


def _file(code):
    """Return a project's file by its real path (dlcp/sim is a link to sim); None if it is another's."""
    path = Path(code.co_filename).resolve()
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
    return name if name.startswith(("dlcp/", "sim/")) and path.suffix == ".py" else None


@contextmanager
def entered():
    """Note the files whose functions are called meanwhile, in a dict that keeps their order."""
    files, known = {}, {}

    def note(frame, event, _):
        if event == "call":
            code = frame.f_code
            if code not in known:
                known[code] = _file(code)
            if known[code]:
                files.setdefault(known[code])

    sys.setprofile(note)
    try:
        yield files
    finally:
        sys.setprofile(None)


def compiled_into(function):
    """Return the files of the functions that are compiled into a compiled one, and its own."""
    seen, waiting = {}, [function.py_func]
    while waiting:
        code, names = waiting[-1].__code__, waiting.pop().__globals__
        if code in seen:
            continue
        seen[code] = _file(code)
        modules = [names[name] for name in code.co_names if isinstance(names.get(name), types.ModuleType)]
        for scope in (names, *map(vars, modules)):
            found = [getattr(scope.get(name), "py_func", scope.get(name)) for name in code.co_names]
            waiting += [each for each in found if isinstance(each, types.FunctionType) and _is_ours(each)]
    return list(dict.fromkeys(filter(None, seen.values())))


def _is_ours(function):
    """Return whether a function is the project's, or written by it (`dlcp.sim.engines.rules.chosen`)."""
    return function.__code__.co_filename == "<string>" or _file(function.__code__) is not None


def walk_of_an_experiment():
    """Return the files from an experiment's file to its plots, run on the kernel, but for those of the engines."""
    from dlcp.sim.experiments.experiment import read
    from dlcp.sim.experiments.running import run
    from dlcp.sim.experiments.sweep import sweep
    from dlcp.sim.tools.report import write_report

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = write_experiment(folder)
        run(read(path, quick=True).runs[0], "kernel")  # compiles
        with entered() as files:
            described = read(path, quick=True)
            sweep(described.runs, folder / "out" / "small", progress=io.StringIO())
            write_report([described], folder / "out")
    return [file for file in files if not file.startswith(ENGINES)]


def walk_of_a_packet():
    """Return the files from the submission of a message to its record, on the kernel, compiled ones last."""
    from dlcp.sim import Scenario, Simulation
    from dlcp.sim.engines.kernel import loop
    from dlcp.sim.graphs.graph import GraphBuilder

    simulation = Simulation(Scenario(), engine="kernel")
    builder = GraphBuilder()
    builder.messages(0, 1, 1000, transport=0)
    with entered() as files:
        simulation.submit(builder.build())
        simulation.run()
    return [*files, *(file for file in compiled_into(loop.run) if file not in files)]


def main():
    """Print both walks."""
    for walk in (walk_of_an_experiment(), walk_of_a_packet()):
        print("\n".join(walk), f"{len(walk)} files", sep="\n", end="\n\n")


if __name__ == "__main__":
    main()
