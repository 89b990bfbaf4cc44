# SPDX-License-Identifier: Apache-2.0
"""Run an experiment's missing runs, in local processes or on a Dask cluster.

A run's result file does not depend on the process or machine that made it. It is written atomically as soon as the run
ends, so an interrupted sweep keeps its results and continues from there.
"""

import importlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Final, TextIO

from dlcp.inputs.document import DocumentError, read_json
from dlcp.sim.experiments.experiment import ExperimentRun
from dlcp.sim.experiments.progress import ProgressBar
from dlcp.sim.experiments.running import digest, run, write
from dlcp.sim.limits import SimulatorError

WAIT_S: Final = 24 * 3600.0
"""How long a sweep waits for its next result: far longer than any run takes."""

_IGNORE_INTERRUPTS: Final = signal.SIGINT, signal.SIG_IGN
"""The handler of Ctrl-C in a pool's processes: they leave it to the process that owns the pool."""
DASK_TIMEOUT_S: Final = 20.0
"""How long a Dask scheduler may take to answer; not tuned."""


class SweepError(SimulatorError):
    """A sweep cannot run or continue."""


def result_file(folder: Path, item: ExperimentRun) -> Path:
    """Return the path of a run's result file."""
    return folder / f"{item.name}.json"


def existing(folder: Path, item: ExperimentRun) -> dict[str, Any] | None:
    """Return a run's results if they exist, are complete, and have the same setting and sources; otherwise None."""
    document = saved(folder, item)
    return document if document is not None and document.get("complete") else None


def saved(folder: Path, item: ExperimentRun) -> dict[str, Any] | None:
    """Return a run's results, complete or not, if they have the same setting and sources; otherwise None."""
    try:
        document = read_json(result_file(folder, item))
    except DocumentError:
        return None
    if not isinstance(document, dict):
        return None
    return document if document.get("digest") == digest(item) else None


def sweep(
    runs: Sequence[ExperimentRun],
    folder: Path,
    *,
    processes: int = 1,
    dask: str | None = None,
    progress: TextIO | None = None,
) -> int:
    """Run all runs without results, and write a file for each.

    Parameters
    ----------
    folder
        Folder for the result files; created if needed.
    processes
        Number of runs in parallel on this machine.
    dask
        Address of a Dask scheduler to run them instead.
    progress
        Where a line for each run is written, and on a terminal the remaining time.

    Returns
    -------
    The number of runs that had no results.

    Raises
    ------
    SweepError
        Dask is not installed or does not answer, a process was killed, or no run ended in time.
    KeyboardInterrupt
        The sweep was interrupted; the files of finished runs are kept.
    """
    missing = [item for item in runs if existing(folder, item) is None]
    with ProgressBar("sweep", progress) as bar:
        bar.say(f"{len(runs)} runs, {len(runs) - len(missing)} of them already in {folder}")
        if not missing:
            return 0
        bar.update(0, len(missing), "runs")
        for count, (item, document) in enumerate(_results(missing, processes, dask), 1):
            write(document, result_file(folder, item))
            bar.say(f"[{count}/{len(missing)}] {item.name}{_summary(document)}")
            bar.update(count, len(missing), "runs")
    return len(missing)


def _results(
    missing: Sequence[ExperimentRun], processes: int, dask: str | None
) -> Iterator[tuple[ExperimentRun, dict[str, Any]]]:
    """Run everything, in this process if ``processes`` is 1, and yield each result when its run ends."""
    if processes == 1 and not dask:
        for item in missing:
            document = run(item)
            yield item, document
            if document.get("ended") == "interrupted":
                raise KeyboardInterrupt
        return
    pool, stop = _dask_pool(dask) if dask else _process_pool(min(processes, len(missing)))
    waiting = {pool.submit(run, item): item for item in missing}
    try:
        while waiting:
            done, _ = wait(waiting, WAIT_S, FIRST_COMPLETED)
            if not done:
                raise SweepError(f"no run ended within {WAIT_S:.0f} s; finished runs are kept: sweep again")
            for future in done:
                yield waiting.pop(future), future.result()
        pool.shutdown()
    except BrokenProcessPool:
        raise SweepError(
            "a process of the pool was killed, probably out of memory; sweep again with fewer --processes: "
            "finished runs are kept"
        ) from None
    finally:
        stop()


def _process_pool(processes: int) -> tuple[Executor, Callable[[], None]]:
    """Return a pool of processes, and a function that terminates them without waiting for their runs."""
    # Spawned processes inherit no state from this one, so results cannot depend on it.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, initializer=signal.signal, initargs=_IGNORE_INTERRUPTS)

    def stop() -> None:
        for process in list((getattr(pool, "_processes", None) or {}).values()):
            process.terminate()
        pool.shutdown(cancel_futures=True)

    return pool, stop


def _dask_pool(address: str) -> tuple[Executor, Callable[[], None]]:
    """Return a pool of a Dask scheduler's workers, and a function that cancels its runs."""
    try:
        distributed: Any = importlib.import_module("distributed")  # has no type annotations
    except ImportError:
        raise SweepError("Dask is not installed; install it with `pip install distributed`") from None
    try:
        client = distributed.Client(address, timeout=DASK_TIMEOUT_S)
    except OSError as error:
        raise SweepError(f"no Dask scheduler answers at {address}: {error}") from None
    return client.get_executor(pure=False), client.close


def _summary(document: dict[str, Any]) -> str:
    metrics = document["metrics"]
    words = []
    if "step_s" in metrics:
        words.append(f"step {metrics['step_s'] * 1e3:.2f} ms, computing {metrics['compute_s'] * 1e3:.2f} ms")
    if "fct_p99_s" in metrics:
        words.append(f"FCT mean {metrics['fct_mean_s'] * 1e3:.3f} ms, p99 {metrics['fct_p99_s'] * 1e3:.3f} ms")
    if metrics.get("loss_ratio"):
        words.append(f"loss {metrics['loss_ratio']:.2%}")
    if not document["complete"]:
        words.append(f"INCOMPLETE: {document['unfinished']}")
    return ": " + "; ".join(words) if words else ""


def default_processes() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
