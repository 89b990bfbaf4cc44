# SPDX-License-Identifier: Apache-2.0
"""The engine in C, compiled once more with checks on every access or for races, goes through its tests."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native.compiled import LIMIT_S, LOAD, ROOT, build, can_compile, compiler

SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
TESTS = {
    "an engine alone": [
        "transport/test_engine_sending.py",
        "transport/test_engine_feedback.py",
        "transport/test_engine_receiving.py",
        "transport/test_engine_reduction.py",
        "transport/test_engine_sockets.py",
        "transport/test_refusals.py",
    ],
    "endpoints": ["transport/test_shared_memory.py", "transport/test_endpoint.py"],
    "collectives": ["collectives/test_direct_in_place.py"],
}
THREADED = ["transport/test_endpoint.py", "transport/test_shared_memory.py"]
RUN = f"""{LOAD}
import pytest
print(sys.argv[1])
sys.exit(pytest.main(sys.argv[2:]))
"""


def checked_by(tmp_path_factory, flags, names):
    """Return the library with checks, and what has to be loaded before Python for it."""
    if not can_compile():
        pytest.skip("needs DLCP's C sources and a compiler")
    library = tmp_path_factory.mktemp("checked") / "checked.so"
    made = build(library, *flags)
    preload = [
        subprocess.run(
            [*compiler(), f"-print-file-name={name}"], capture_output=True, text=True, timeout=60
        ).stdout.strip()
        for name in names
    ]
    if made.returncode or not all(Path(path).is_absolute() for path in preload):
        pytest.skip(f"the compiler has no {names[0]}")
    return library, " ".join(preload)


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    return checked_by(tmp_path_factory, SANITIZE, ["libasan.so", "libubsan.so"])


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    library, preload = checked_by(tmp_path_factory, ["-fsanitize=thread"], ["libtsan.so"])
    alone = subprocess.run([sys.executable, "-c", ""], env=os.environ | {"LD_PRELOAD": preload}, timeout=LIMIT_S)
    if alone.returncode:
        pytest.skip("the thread sanitizer does not run here: it cannot place its memory")
    return library, preload


def run(checked, *arguments):
    library, preload = checked
    environment = os.environ | {
        "LD_PRELOAD": preload,
        "ASAN_OPTIONS": "detect_leaks=0:exitcode=86",
        "UBSAN_OPTIONS": "print_stacktrace=1:exitcode=86",
        "TSAN_OPTIONS": "ignore_noninstrumented_modules=1:exitcode=86",
        "PYTHONMALLOC": "malloc",
    }
    return subprocess.run(
        [sys.executable, "-c", RUN, str(library), *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


@pytest.mark.parametrize("names", TESTS.values(), ids=TESTS)  # apart: all of them take minutes on a busy machine
def test_no_access_is_out_of_bounds(checked, names):
    files = [str(ROOT / "tests" / name) for name in names]
    done = run(checked, "-q", "-x", "-s", "-p", "no:cacheprovider", "-k", "not stage", *files)
    assert str(checked[0]) in done.stdout
    told = done.stdout + done.stderr
    fault = max(told.find("ERROR: "), told.find("runtime error: "))
    assert done.returncode == 0, told[max(0, fault - 200) :][:3000] if fault >= 0 else told[-3000:]


def test_the_checks_see_an_access_that_is_out_of_bounds(checked, tmp_path):
    wrong = tmp_path / "test_wrong.py"
    wrong.write_text(
        "import numpy as np\n"
        "from dlcp.transport import RELIABLE, ReceiveRequest\n"
        "from tests.transport.bare_engine import BareEngine, KEY, SIZE\n"
        "def test_wrong():\n"
        "    bare = BareEngine()\n"
        "    request = ReceiveRequest(1, KEY, 4 * SIZE, RELIABLE, 'layer')\n"
        "    bare.engine.receive(request, 4, np.zeros(3 * SIZE, np.uint8), RELIABLE, 0.0)\n"
        "    bare.take_data(3, 4)\n"
    )
    done = run(
        checked,
        "-q",
        "-s",
        "-p",
        "no:cacheprovider",
        "-o",
        f"pythonpath={ROOT}",
        "--rootdir",
        str(tmp_path),
        str(wrong),
    )
    assert done.returncode != 0
    assert "Sanitizer" in done.stdout + done.stderr or "runtime error" in done.stdout + done.stderr


@pytest.mark.parametrize("name", THREADED)
def test_threads_do_not_race(watched, name):
    done = run(watched, "-q", "-x", "-s", "-p", "no:cacheprovider", str(ROOT / "tests" / name))
    told = done.stdout + done.stderr
    assert "WARNING: ThreadSanitizer" not in told, told[told.find("WARNING: ThreadSanitizer") :][:3000]
    assert done.returncode == 0, told[-3000:]


RACE = f"""{LOAD}
import threading
import numpy as np
from dlcp.values.planes import PlaneLayout
layout = PlaneLayout.of(100_000, 4, 8, 1024)
values, code = np.ones(100_000, np.float32), np.zeros(layout.bytes, np.uint8)
threads = [threading.Thread(target=lambda: [layout.round(values, code) for _ in range(50)]) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_the_checks_see_a_race(watched):
    library, preload = watched
    environment = os.environ | {"LD_PRELOAD": preload, "TSAN_OPTIONS": "ignore_noninstrumented_modules=1:exitcode=86"}
    command = [sys.executable, "-c", RACE, str(library)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, "data race" in done.stderr) == (86, True)


ALLOCATIONS = """
#include <stdlib.h>
long dlcp_test_left = -1;
long dlcp_test_large;
static void *maybe(void *memory) {
    if (dlcp_test_left < 0) return memory;
    if (dlcp_test_left == 0) { free(memory); return NULL; }
    dlcp_test_left--;
    return memory;
}
void *dlcp_test_malloc(size_t bytes) {
    dlcp_test_large += bytes >= 1000000 && bytes < 3000000;
    return maybe(malloc(bytes));
}
void *dlcp_test_calloc(size_t count, size_t bytes) { return maybe(calloc(count, bytes)); }
void *dlcp_test_realloc(void *memory, size_t bytes) { return dlcp_test_left == 0 ? NULL : realloc(memory, bytes); }
"""
PROTOTYPES = """
#include <stdlib.h>
void *dlcp_test_malloc(size_t);
void *dlcp_test_calloc(size_t, size_t);
void *dlcp_test_realloc(void *, size_t);
"""
BARE = f"""{LOAD}
import ctypes
from dlcp.transport import MessageKey
from tests.transport.bare_engine import SIZE, BareEngine, tags_of
bare = BareEngine()
def told(name):
    return ctypes.c_long.in_dll(ctypes.CDLL(sys.argv[1]), "dlcp_test_" + name)
"""


@pytest.fixture(scope="module")
def with_our_allocations(tmp_path_factory):
    """Return a function that runs a script with an engine whose memory comes from ``ALLOCATIONS``, and its output."""
    if not can_compile():
        pytest.skip("needs DLCP's C sources and a compiler")
    folder = tmp_path_factory.mktemp("allocations")
    (folder / "ours.c").write_text(ALLOCATIONS)
    (folder / "ours.h").write_text(PROTOTYPES)
    subprocess.run([*compiler(), "-fPIC", "-c", "ours.c", "-o", "ours.o"], cwd=folder, check=True, timeout=LIMIT_S)
    defined = [f"-D{name}=dlcp_test_{name}" for name in ("malloc", "calloc", "realloc")]
    flags = ["-D_GNU_SOURCE=1", "-w", "-include", str(folder / "ours.h"), *defined]
    made = build(folder / "ours.so", *flags, more=[folder / "ours.o"])
    assert made.returncode == 0, made.stderr

    def run(script):
        command = [sys.executable, "-c", BARE + script, str(folder / "ours.so")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


SHORT_RUN = """
message, _ = bare.send(tags_of([4] * 5))
told("left").value = 0
assert bare.engine.pump(1.0) == 0
told("left").value = -1
assert message.sent == 0, "what could never be found lost must not leave"
try:
    bare.drain()
except MemoryError:
    print("told")
"""


def test_packets_that_cannot_be_noted_do_not_leave_and_the_engine_says_so(with_our_allocations):
    assert with_our_allocations(SHORT_RUN) == "told\n"


EARLY_RUN = """
before = told("large").value
for step, packets in enumerate([20000, 20001, 19999, 20001, 20000], 1):
    bare.engine.begin_step(step, 0.0)
    bare.take_data(0, packets, key=MessageKey(step, 2))
    assert bare.engine.view.early_bytes == packets * SIZE
print(told("large").value - before)
"""


def test_messages_that_differ_by_a_packet_share_memory_for_what_comes_early(with_our_allocations):
    assert with_our_allocations(EARLY_RUN) == "1\n"


SENT_RUN = """
import numpy as np
from dlcp.wire import PacketType
before = told("large").value
for step, packets in enumerate([60000, 60001, 59999], 1):
    bare.send(tags_of(np.full(packets, 4)), key=MessageKey(step, 2))
    bare.take(PacketType.STOP, step=step, message=2, count=packets)
    assert len(bare.confirmed) == step
print(told("large").value - before)
"""


def test_large_messages_are_sent_from_the_same_memory_again(with_our_allocations):
    assert with_our_allocations(SENT_RUN) == "1\n"


FAULTS_RUN = """
import ctypes, resource, sys
from dlcp.transport import Membership, TransportOptions
from dlcp.transport.engine import Engine

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def faults_of_a_step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    gradients = [libc.malloc(6 << 20) for _ in range(8)]
    for each in gradients:
        ctypes.memset(each, 1, 6 << 20)
    for each in gradients:
        libc.free(each)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "engine":
    Engine(Membership(0), {}, options=TransportOptions(), sock=None, now_s=0.0)
print(min(faults_of_a_step() for _ in range(5)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="memory is that of another library than glibc")
def test_an_engine_leaves_the_memory_of_its_process_as_it_is():
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    faults = {
        beside: int(
            subprocess.run(
                [sys.executable, "-c", FAULTS_RUN, beside],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=True,
            ).stdout
        )
        for beside in ("nothing", "engine")
    }
    assert min(faults.values()) > 1000, "the engine has changed how the process's allocator treats freed memory"
