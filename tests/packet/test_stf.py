# SPDX-License-Identifier: Apache-2.0
"""The packet tests of p4/stf on the built-in switch, both its back ends, and on simple_switch where it is installed.

Then the same with all entries written through P4Runtime, on the built-in switch's server and on simple_switch_grpc.
"""

import functools
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("msgspec", reason="entries are read with msgspec: pip install dlcp[switch]")

from dlcp.host import netlab
from dlcp.switch import EntryError, Program
from tests.conformance import simple_switch
from tests.conformance.recorder import Uncertain
from tests.packet import stf
from tests.packet.bmv2_target import Bmv2
from tests.packet.stf_text import text

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "p4" / "build" / "dlcp.json"
FILES = sorted((ROOT / "p4" / "stf").glob("*.stf*"))
ATTEMPTS = 3
EVERY = 8
"""One in this many of p4testgen's cases uses P4Runtime: a case takes a dozen calls."""
CONTROLS = {
    "parser",
    "trust",
    "share",
    "classify",
    "route",
    "depth",
    "drop",
    "excess",
    "mark",
    "ipv6",
    "trim",
    "p4testgen",
}
SETUP = """
member route_selector 3 to_next_hop(port:3, mac:02:00:00:00:00:03)
add ipv4_route ipv4_dst:10.0.0.3/32 member 3
"""
SENT = "packet 1 ethernet() ipv4(src=10.0.0.1, dst=10.0.0.3) tcp()\n"
CAME = (
    "expect 3 ethernet(src=02:00:00:00:00:ff, dst=02:00:00:00:00:03) ipv4(src=10.0.0.1, dst=10.0.0.3, ttl=63) tcp()\n"
)


@functools.cache
def built_in(backend: str) -> stf.BuiltIn:
    return stf.BuiltIn(Program.load(PROGRAM, backend=backend))


@functools.cache
def script(path: Path) -> stf.Script:
    return stf.read(path)


@pytest.fixture(scope="module")
def bmv2():
    needs_simple_switch()
    target = Bmv2(simple_switch.SimpleSwitch(PROGRAM))
    yield target
    target.close()


@pytest.fixture(scope="module")
def built_in_by_p4runtime():
    targets = pytest.importorskip(
        "tests.packet.p4runtime_target", reason="P4Runtime takes finsy: pip install dlcp[fabric]"
    )
    target = targets.BuiltInByP4Runtime("python")
    yield target
    target.close()


@pytest.fixture(scope="module")
def bmv2_by_p4runtime():
    targets = pytest.importorskip(
        "tests.packet.p4runtime_target", reason="P4Runtime takes finsy: pip install dlcp[fabric]"
    )
    needs_simple_switch()
    if shutil.which("simple_switch_grpc") is None:
        pytest.skip("simple_switch_grpc is not on PATH")
    target = targets.Bmv2ByP4Runtime(PROGRAM)
    yield target
    target.close()


def needs_simple_switch():
    for works, reason in (simple_switch.available(), netlab.available()):
        if not works:
            pytest.skip(f"needs simple_switch in a network namespace: {reason}")


def sample(path: Path) -> stf.Script:
    """Return a test, of p4testgen's cases some; each begins by removing all entries."""
    whole = script(path)
    starts = [index for index, one in enumerate(whole.statements) if calls(one, "remove_all")]
    if len(starts) < EVERY:
        return whole
    ends = [*starts[1:], len(whole.statements)]
    cases = list(zip(starts, ends, strict=True))[::EVERY]
    return stf.Script(whole.path, tuple(one for start, end in cases for one in whole.statements[start:end]))


def calls(statement: stf.Statement, method: str) -> bool:
    return isinstance(statement, stf.Call) and statement.method == method


def name(path: Path) -> str:
    return path.name.split(".")[0]


def test_there_is_a_test_for_each_control():
    assert {name(path) for path in FILES} == CONTROLS


@pytest.mark.compiled("v1model")
@pytest.mark.parametrize("backend", ["python", "numba"])
@pytest.mark.parametrize("path", FILES, ids=name)
def test_built_in_switch(path, backend):
    if backend == "numba" and importlib.util.find_spec("numba") is None:
        pytest.skip("numba is not installed")
    outcome = stf.run(script(path), built_in(backend))
    assert outcome.failures == []
    assert outcome.packets == script(path).packets() > 0
    assert outcome.expected > 0


@pytest.mark.compiled("v1model")
@pytest.mark.parametrize("path", FILES, ids=name)
def test_simple_switch(path, bmv2):
    check_real(script(path), bmv2)


@pytest.mark.compiled("v1model")
@pytest.mark.parametrize("path", FILES, ids=name)
def test_built_in_switch_by_p4runtime(path, built_in_by_p4runtime):
    outcome = stf.run(sample(path), built_in_by_p4runtime)
    assert outcome.failures == []
    assert outcome.packets == sample(path).packets() > 0
    assert outcome.expected > 0


@pytest.mark.compiled("v1model")
@pytest.mark.parametrize("path", FILES, ids=name)
def test_simple_switch_by_p4runtime(path, bmv2_by_p4runtime):
    check_real(sample(path), bmv2_by_p4runtime)


def check_real(test, target):
    for attempt in range(1, ATTEMPTS + 1):
        try:
            outcome = stf.run(test, target)
            if outcome.passed or not any(calls(one, "slow") for one in test.statements):
                break  # slow queues are a matter of time on a busy machine; everything else is not
        except Uncertain as error:
            if attempt == ATTEMPTS:
                pytest.skip(f"simple_switch's answers are not certain on a machine this busy: {error}")
    assert outcome.failures == []
    assert outcome.packets == test.packets()


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (SENT, "unexpected packet at port 3"),
        (SENT + "no_packet\n", "unexpected packet at port 3"),
        (SENT + CAME + CAME, "expected at port 3"),
        (SENT + CAME.replace("expect 3", "expect 4"), "unexpected packet at port 3"),
        (SENT + CAME.replace("ttl=63", "ttl=62"), "differs in bytes 22, 24"),
        (SENT + CAME.replace("tcp()", "tcp() 00"), "differs in bytes 17"),
        (SENT + CAME + "check_counter egress_events(3,1,0,FORWARDED) packets == 2\n", "is 1, expected == 2"),
        (SENT + CAME + "check_counter egress_events(3,1,0,FORWARDED) bytes < 54\n", "is 54, expected < 54"),
        (SENT + CAME + "check_register queue_depth(3,1) != 0\n", "is 0, expected != 0"),
        (CAME + SENT + CAME, "expected at port 3"),
        ("packet 1 00\nexpect 3\n", "expected at port 3: a packet"),
        (SENT + "no_packet\n" + "expect 3\n" + "no_packet", "a packet is expected as well"),
    ],
)
def test_what_is_wrong_is_found(text, wrong):
    outcome = stf.run(stf.parse(SETUP + text), built_in("python"))
    assert not outcome.passed
    assert any(wrong in failure for failure in outcome.failures), outcome.failures
    assert all(failure.startswith("test:") for failure in outcome.failures)


@pytest.mark.parametrize(
    "text",
    [
        SENT + CAME,
        SENT + "expect 3\n",
        SENT + "expect 3 020000000003 ************ 0800 45\n",
        SENT + "expect 3 020000000003 0200000000ff 0800" + "*" * 80 + "$\n",
        SENT + "expect 3 02000000000*\n",
    ],
)
def test_what_is_right_passes(text):
    assert stf.run(stf.parse(SETUP + text), built_in("python")).failures == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("paket 1 00", "did you mean packet"),
        ("mirroring_add 5 3", "no statement 'mirroring_add'"),
        ("expect 3 00", "sends no packet"),
        ("", "sends no packet"),
        ("packet 1 0", "half a byte"),
        ("packet 1 0*", "cannot contain *"),
        ("packet 1 ether()", "no layer 'ether'"),
        ("packet 1 ethernet(source=1)", "has no field 'source'"),
        ("packet 1 ethernet(type=0x12345)", "16 bits"),
        ("packet 1 ethernet() ipv4(src=10.0.0.1)", "needs src and dst"),
        ("packet x 00", "invalid literal"),
        ("check_counter egress_events(3,1,0,FORWARD) packets == 1", "did you mean FORWARDED"),
        ("check_counter egress_events(0) == 1", "packets or bytes"),
        ("check_register queue_depth 3 == 1", "expected NAME(INDEX)"),
        ("add ipv4_route ipv4_dst:10.0.0.3/32", "expected ACTION"),
        ("add ipv4_route ipv4_dst members 3", "expected ACTION"),
        ("  packet 1 00", "none began"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_line(text, wrong):
    with pytest.raises(stf.StfError, match=r"test(:\d+)?: ") as caught:
        stf.parse(f"# a comment\n{text}\n")
    assert wrong in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["add ipv4_rout ipv4_dst:1 member 1", "register_write depth 0 1", "release 3", "add port_trust ig:1 trust()"],
)
def test_names_that_the_program_has_not_got_are_errors(text):
    with pytest.raises(EntryError):
        stf.run(stf.parse(f"{text}\n{SENT}"), built_in("python"))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_statements_are_written_as_they_were_read(path):
    def without_lines(statements):
        return [{**vars(one), "line": 0, "kind": type(one)} for one in statements]

    before = script(path)
    assert without_lines(stf.parse(text(before.statements)).statements) == without_lines(before.statements)


def test_the_command_tells_by_its_status(tmp_path, capsys):
    path = tmp_path / "one.stf"

    def run(text):
        path.write_text(text)
        status = stf.main(["--program", str(PROGRAM), str(path)])
        return status, "".join(capsys.readouterr())

    assert run(SETUP + SENT + CAME)[0] == 0
    done = subprocess.run([sys.executable, "-m", "tests.packet.stf", str(path)], timeout=60, check=False, cwd=ROOT)
    assert done.returncode == 0
    status, said = run(SETUP + SENT)
    assert status == 1
    assert "one.stf:4: unexpected packet at port 3" in said
    status, said = run("skip this\n")
    assert status == 2
    assert "one.stf:1" in said
