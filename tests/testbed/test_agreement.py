# SPDX-License-Identifier: Apache-2.0
"""Whether what hosts and switches counted agrees: by hand, so that each side can be wrong by one."""

from collections import Counter
from dataclasses import replace

import pytest

pytest.importorskip("finsy", reason="switches are read over P4Runtime: pip install dlcp[fabric]")
pytest.importorskip("torch", reason="the demo trains with PyTorch")

from controller.shapes import leaf_spine, star
from controller.testbed.accounts import NicCount, Place, SwitchAccount
from controller.testbed.agreement import compare, uncounted_tails
from controller.testbed.layout import lay_out
from controller.testbed.place import Accounts, as_counters
from dlcp.switch.queues import PortQueueing

RATE_BPS = 32_000_000
LAYOUT = lay_out(star(3, ports="packet", queueing=PortQueueing(rate_bps=RATE_BPS)), "builtin", "t")
LEDGER = {"sent": 110, "lost": 8, "retransmitted": 2}


def account(tails=True):
    """Hosts 0 and 1 send 50 + 60 gradient packets to host 2, and TCP; it answers with control, some over its share."""
    events = Counter(
        {
            Place("FORWARDED", 3, 4, 5): 60,
            Place("FORWARDED", 3, 2, 0): 30,
            Place("FORWARDED", 3, 0, 0): 10,
            Place("FORWARDED", 3, 1, 0): 500,
            Place("FORWARDED", 1, 7, 0): 20,
            Place("FORWARDED", 2, 7, 0): 15,
            Place("FORWARDED", 2, 0, 0): 5,
            Place("OVER_SHARE", 2, 7, 0): 5,
            Place("OVER_SHARE", 3, 4, 5): 10,
            Place("POLICY_DROP", 3, 4, 7): 8,
        }
    )
    return SwitchAccount(events, Counter(), Counter({(3, 1): 40, (3, 4): 2}) if tails else None)


def accounts(switch, **changes):
    nics = {
        "host0": NicCount(50 + 542, 20, 0),
        "host1": NicCount(58, 20, 0),
        "host2": NicCount(40, 600, 0),
    }
    busiest = {"host0": 1e6, "host1": 1e6, "host2": 31.9e6}
    return replace(Accounts({"switch": switch}, nics, busiest, 0), **changes)


def agreed(findings):
    return [finding["agree"] for finding in findings]


def check(found, ledger=LEDGER, **options):
    return compare(LAYOUT, found, ledger, **{"tagged": True, "server": None, **options})


def test_all_agree():
    findings = check(accounts(account()))
    assert agreed(findings) == [True] * 5, findings
    gradients = findings[2]
    assert gradients["hosts"] == gradients["switches"] == "110"


@pytest.mark.parametrize("lost", [Place("FORWARDED", 3, 4, 5), Place("POLICY_DROP", 3, 4, 7)])
def test_one_gradient_that_the_switch_has_not_counted_is_noticed(lost):
    wrong = account()
    wrong.events[lost] -= 1
    received, sent, gradients, *_ = agreed(check(accounts(wrong)))
    assert received == (lost.event == "POLICY_DROP")
    assert not sent
    assert not gradients


def test_one_packet_that_the_ledger_does_not_know_is_noticed():
    assert agreed(check(accounts(account()), LEDGER | {"sent": 109})) == [True, True, False, True, True]


def test_more_dropped_by_choice_than_the_hosts_know_of_is_noticed():
    assert agreed(check(accounts(account()), LEDGER | {"lost": 5}))[3] is False


def test_a_protected_packet_that_was_dropped_is_noticed():
    wrong = account()
    wrong.events[Place("POLICY_DROP", 3, 4, 7)] -= 1
    wrong.events[Place("POLICY_DROP", 3, 4, 0)] += 1
    assert agreed(check(accounts(wrong))) == [True, True, True, False, True]


def test_a_port_that_is_too_fast_is_noticed():
    busiest = {"host0": 1e6, "host1": 1e6, "host2": 1.02 * RATE_BPS}
    assert agreed(check(accounts(account(), busiest_bps=busiest)))[-1] is False


def test_what_bmv2_does_not_count_is_said_and_not_claimed():
    found = accounts(account(tails=False))
    findings = check(found)
    assert agreed(findings) == [True, None, None, True, True]
    assert "42" in findings[1]["note"]
    assert "2 found a queue full" in findings[2]["note"]
    assert uncounted_tails(LAYOUT, found) == 42
    assert uncounted_tails(LAYOUT, accounts(account())) is None


def test_without_tags_gradients_are_ordinary_traffic():
    assert len(check(accounts(account()), tagged=False)) == 3
    assert len(check(accounts(account()), None)) == 3


def test_a_switch_that_was_started_again_cannot_be_compared():
    findings = check(accounts(account(), restarts=1))
    assert agreed(findings) == [None]


def test_gradients_to_a_server_are_counted_at_its_port():
    toward_workers = account()
    toward_workers.events[Place("FORWARDED", 1, 2, 0)] += 33
    gradients = check(accounts(toward_workers), server=2)[2]
    assert gradients["agree"], gradients
    layout = lay_out(leaf_spine(2, 2, 2, queueing=PortQueueing(rate_bps=RATE_BPS)), "builtin", "t")
    assert {trunk.ends for trunk in layout.trunks} == {
        ((f"leaf{leaf}", 2 + spine), (f"spine{spine}", leaf)) for leaf in (1, 2) for spine in (1, 2)
    }


def test_counters_in_the_form_that_the_demo_reads():
    counters = as_counters({"switch": account()})
    totals = counters["program"]["ingress_events"]["totals"]
    assert totals == {"OVER_SHARE": 15, "POLICY_DROP": 8}
    assert counters["program"]["egress_events"]["totals"] == {"FORWARDED": 640}
    assert sum(queue["tail_drops"] for queue in counters["ports"][0]["queues"]) == 42


def test_since_gives_what_came_after_and_all_after_a_restart():
    before, now = account(), account()
    now.events[Place("FORWARDED", 3, 1, 0)] += 7
    assert now.since(before).count("FORWARDED") == 7
    assert now.since(before).tails() == 0
    assert before.since(now) is before
