# SPDX-License-Identifier: Apache-2.0
"""Children end with their parent, however it ends, and import the DLCP that it has."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest

from tests.waiting import until

REPOSITORY = Path(__file__).parent.parent
_PARENT = """
import subprocess, sys
from dlcp.host import processes
process, lifeline = processes.start("tests.test_processes", sys.argv[1], stdout=subprocess.PIPE)
print(process.stdout.readline().decode().strip(), flush=True)
sys.stdin.read()
"""


BEGIN_S = 120
"""How long a demo may take to begin, on a machine with much else to do."""

# A demo's switch has a fixed address: other tests that run beside may use it, too.
OWN_LOOPBACK = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"] if os.geteuid() == 0 else []


class Marked:
    """A process whose environment has a mark, by which what it starts is found; its files go to a folder."""

    def __init__(self, argv, folder, **options):
        self._mark = f"DLCP_IN_TEST={uuid.uuid4().hex}".encode()
        name, value = self._mark.decode().split("=")
        environment = {**os.environ, name: value, "TMPDIR": str(folder)}
        self.process = subprocess.Popen(argv, env=environment, stdin=subprocess.PIPE, text=True, **options)

    def pids(self):
        """Return the marked processes that run."""
        return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal() and self._is_marked(path)]

    def commands(self):
        """Return the command lines of the marked processes."""
        return [self._read(Path("/proc", str(pid), "cmdline")) for pid in self.pids()]

    def _is_marked(self, path):
        return self._mark in self._read(path / "environ").split(b"\0")

    @staticmethod
    def _read(path):
        try:
            return path.read_bytes()
        except OSError:
            return b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


@pytest.mark.parametrize("how", ["wait", "keep the GIL"])
def test_a_child_ends_with_a_parent_that_is_killed(tmp_path, how):
    with Marked([sys.executable, "-c", _PARENT, how], tmp_path, stdout=subprocess.PIPE, cwd=REPOSITORY) as marked:
        assert marked.process.stdout.readline() == "child\n"
        assert len(marked.pids()) == 2
        marked.process.kill()
        marked.process.wait()
        until(lambda: not marked.pids())


@pytest.fixture
def short_folder():
    """Return a folder for temporary files whose path leaves room for a socket's: that has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="dlcp-") as folder:
        yield Path(folder)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_demo_that_is_ended_leaves_no_process(tmp_path, short_folder, number):
    words = ["demo", "--loopback", "--steps", "100000", "--only", "dlcp", "--out", str(tmp_path / "out")]
    argv = [*OWN_LOOPBACK, sys.executable, "-m", "dlcp.cli", *words]
    with Marked(argv, short_folder, stdout=subprocess.DEVNULL, cwd=REPOSITORY) as marked:
        # Its switch, and ranks that have begun: what there is then has to end.
        until(lambda: any(b"switch" in command for command in marked.commands()), deadline_s=BEGIN_S)
        until(lambda: any(path.name.startswith("dlcp-demo-") for path in short_folder.iterdir()), deadline_s=BEGIN_S)
        until(lambda: len(marked.pids()) > 8, lambda: f"only {marked.commands()}", BEGIN_S)
        marked.process.send_signal(number)
        assert marked.process.wait(60) == (128 + number if number == signal.SIGTERM else -number)
        # The fork server looks for its parent's end only once it has imported PyTorch.
        until(lambda: not marked.pids(), lambda: f"{marked.commands()} are left", BEGIN_S)
    if number == signal.SIGTERM:
        left = [path.name for path in short_folder.iterdir() if path.name.startswith("dlcp-")]
        assert not left


def test_where_temporary_files_have_long_paths_a_demo_says_what_to_do(tmp_path):
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    done = subprocess.run(
        [*OWN_LOOPBACK, sys.executable, "-m", "dlcp.cli", "demo", "--loopback", "--out", tmp_path / "out"],
        env={**os.environ, "TMPDIR": str(folder)},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "set TMPDIR to a shorter one" in done.stderr
    assert "Traceback" not in done.stderr


def test_processes_of_a_launch_that_is_killed_end(tmp_path):
    argv = [sys.executable, "-m", "dlcp.cli", "launch", "-n", "2", "--", "sleep", "1000"]
    with Marked(argv, tmp_path, cwd=REPOSITORY) as marked:
        until(lambda: sum(command.split(b"\0")[0] == b"sleep" for command in marked.commands()) == 2)
        marked.process.kill()
        marked.process.wait()
        until(lambda: not marked.pids())


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return a folder with DLCP as installed: its packages in the places that they have then, and the engine."""
    folder = tmp_path_factory.mktemp("installed")
    caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "dlcp", folder / "dlcp", ignore=caches)
    for name, place in {"controller": "controller", "sim": "sim", "switch/p4": "p4/build"}.items():
        shutil.copytree(REPOSITORY / place, folder / "dlcp" / name, ignore=caches, dirs_exist_ok=True)
    return folder


@pytest.fixture
def checkout(tmp_path):
    """Return a folder with an uncompiled ``dlcp`` whose import leaves a trace."""
    folder = tmp_path / "checkout"
    (folder / "dlcp").mkdir(parents=True)
    (folder / "dlcp" / "__init__.py").write_text(
        f"raise SystemExit(open({str(tmp_path / 'trace')!r}, 'w').write('the wrong dlcp was imported'))\n"
    )
    return folder


def run_installed(installed, checkout, *words):
    """Run the installed command in the checkout, as its console script would."""
    script = installed / "bin" / "dlcp"
    script.parent.mkdir(exist_ok=True)
    # As pip writes it: multiprocessing imports it again in children.
    script.write_text("from dlcp.cli import main\nif __name__ == '__main__':\n    raise SystemExit(main())\n")
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [*OWN_LOOPBACK, sys.executable, str(script), *words],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert not (checkout.parent / "trace").exists(), (checkout.parent / "trace").read_text() + done.stderr
    return done


@pytest.mark.timeout(200)
def test_ranks_in_a_checkout_train_with_the_installed_dlcp(installed, checkout):
    words = ["--nproc-per-node", "1", "--", "-m", "dlcp.examples.image_classifier", "--help"]
    done = run_installed(installed, checkout, "train", *words)
    assert done.returncode == 0, done.stderr
    assert "usage: " in done.stdout


@pytest.mark.timeout(200)
def test_a_module_in_the_working_directory_is_found_as_with_torchrun(installed, checkout):
    (checkout / "own.py").write_text("import beside, dlcp\nprint(beside.__name__, dlcp.__file__)\n")
    (checkout / "beside.py").write_text("")
    for target in (["-m", "own"], ["own.py"]):
        done = run_installed(installed, checkout, "train", "--nproc-per-node", "1", "--", *target)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"beside {installed}/dlcp/__init__.py\n"


@pytest.mark.timeout(200)
def test_a_demo_in_a_checkout_runs(installed, checkout):
    words = ["--loopback", "--steps", "1", "--only", "dlcp", "--burst-seconds", "0.1", "--out", str(checkout / "out")]
    done = run_installed(installed, checkout, "demo", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (checkout / "out" / "runs" / "dlcp.json").exists()


if __name__ == "__main__":
    print("child", flush=True)
    if sys.argv[1] == "wait":
        signal.pause()
    else:  # no other thread of Python runs meanwhile
        ctypes.PyDLL(None).sleep(1000)
