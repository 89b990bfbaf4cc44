# SPDX-License-Identifier: Apache-2.0
"""Every statement, branch, parser transition and kind of table entry of the program is reached by a packet test."""

from pathlib import Path

import pytest

pytest.importorskip("msgspec", reason="entries are read with msgspec: pip install dlcp[switch]")

from tests.packet import stf
from tests.packet.program_coverage import Covered

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "p4" / "build" / "dlcp.json"
FILES = sorted((ROOT / "p4" / "stf").glob("*.stf"))

pytestmark = pytest.mark.compiled("v1model")


def covered(files) -> Covered:
    target = Covered(str(PROGRAM))
    for path in files:
        outcome = stf.run(stf.read(path), target)
        assert outcome.passed, outcome.failures
    return target


def test_packet_tests_reach_everything():
    target = covered(FILES)
    assert sorted(target.missed()) == []
    assert len(target.everything()) > 100


@pytest.mark.parametrize(
    ("file", "lost"),
    [
        ("ipv6", "table DlcpIngress.route.ipv6_route: ipv6_dst any"),
        ("trim", "table DlcpIngress.selective_drop.trimming: action DlcpIngress.selective_drop.trim"),
        ("share", "table DlcpIngress.share.job_share: entry does unlimited"),
        ("trust", "table DlcpIngress.trust.port_trust: entry does clear_tags"),
        ("classify", "table DlcpIngress.classify.classify: job mask"),
        ("route", "table DlcpIngress.route.ipv4_route: group of several"),
        ("parser", "parser parse_dlcp: too short for dlcp"),
    ],
)
def test_each_file_is_missed_when_it_is_gone(file, lost):
    missed = covered([path for path in FILES if path.stem != file]).missed()
    assert lost in missed
