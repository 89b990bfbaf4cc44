# SPDX-License-Identifier: Apache-2.0
"""Whether what hosts and switches counted agrees: by hand, so that each side can be wrong by one."""

from collections import Counter
from dataclasses import replace

import pytest

pytest.importorskip("finsy", reason="switches are read over P4Runtime: pip install dlcp[fabric]")
pytest.importorskip("torch", reason="the demo trains with PyTorch")

from dlcp.controller.fabric import leaf_spine, star
from dlcp.controller.testbed.accounts import Accounts, NicCount, compare, uncounted_tails
from dlcp.controller.testbed.layout import lay_out
from dlcp.demo.testbed_runs import as_counters
from dlcp.switch import PortQueueing
from dlcp.switch.event_counters import Place, SwitchAccount

RATE_BPS = 32_000_000
LAYOUT = lay_out(star(3, ports="packet", queueing=PortQueueing(rate_bps=RATE_BPS)), "builtin", "t")
LEDGER = {"sent": 110, "lost": 8, "retransmitted": 2, "extra": 0}


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


def check(found, *ledgers, layout=LAYOUT, tagged=True):
    return compare(layout, found, ledgers or (LEDGER,), tagged=tagged)


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
    assert "2 were dropped, uncounted" in findings[2]["note"]
    assert uncounted_tails(LAYOUT, found) == 42
    assert uncounted_tails(LAYOUT, accounts(account())) is None


def test_without_tags_gradients_are_ordinary_traffic():
    assert len(check(accounts(account()), tagged=False)) == 3
    assert len(compare(LAYOUT, accounts(account()), (), tagged=True)) == 3


def test_a_switch_that_was_started_again_cannot_be_compared():
    findings = check(accounts(account(), restarts=1))
    assert agreed(findings) == [None]


def test_what_a_server_sends_is_in_its_own_ledger():
    toward_workers = account()
    toward_workers.events[Place("FORWARDED", 1, 2, 0)] += 33
    assert check(accounts(toward_workers))[2]["agree"] is False
    gradients = check(accounts(toward_workers), LEDGER, {"sent": 33, "lost": 0, "retransmitted": 0, "extra": 0})[2]
    assert gradients["agree"], gradients


def test_probes_in_the_packets_queue_count_as_packets():
    assert agreed(check(accounts(account()), LEDGER | {"sent": 106, "extra": 4})) == [True] * 5


LEAF_SPINE = lay_out(leaf_spine(2, 2, 2, queueing=PortQueueing(rate_bps=RATE_BPS)), "builtin", "t")
HOST, TRUNK = 1, 3


def over_two_leaves():
    """Host 0 sends host 2 100 gradient packets by way of a spine; three are lost, each at another kind of place."""
    first, spine, last = Counter(), Counter(), Counter()
    first[Place("FORWARDED", TRUNK, 4, 5)] = 99
    spine[Place("FORWARDED", 2, 4, 5)] = 98
    spine[Place("POLICY_DROP", 2, 4, 5)] = 1
    last[Place("FORWARDED", HOST, 4, 5)] = 97
    tails = {"leaf1": {(TRUNK, 4): 1}, "leaf2": {(HOST, 4): 1}}
    events = {"leaf1": first, "spine1": spine, "leaf2": last, "spine2": Counter()}
    switches = {name: SwitchAccount(found, Counter(), Counter(tails.get(name))) for name, found in events.items()}
    nics = {"host0": NicCount(100, 0, 0), "host2": NicCount(0, 97, 0)}
    return Accounts(switches, nics, {"host0": 0, "host2": 1e6}, 0), {
        "sent": 100,
        "lost": 3,
        "retransmitted": 0,
        "extra": 0,
    }


def test_a_packet_counts_once_however_many_switches_it_crosses():
    found, ledger = over_two_leaves()
    assert set(LEAF_SPINE.trunks) == {
        ((f"leaf{leaf}", 2 + spine), (f"spine{spine}", leaf)) for leaf in (1, 2) for spine in (1, 2)
    }
    assert agreed(check(found, ledger, layout=LEAF_SPINE)) == [True] * 5
    found.switches["spine1"].events[Place("POLICY_DROP", 2, 4, 5)] -= 1
    assert agreed(check(found, ledger, layout=LEAF_SPINE))[1:3] == [False, False]


def test_control_that_may_have_found_a_full_queue_between_switches_is_said_and_not_claimed():
    found, ledger = over_two_leaves()
    leaf = found.switches["leaf1"]
    leaf.events[Place("OVER_SHARE", TRUNK, 7, 0)] = 4
    leaf.tail_drops[TRUNK, 0] += 2  # one gradient, and one control packet that was moved
    found.nics["host0"] = NicCount(102, 0, 0)
    ledger = ledger | {"sent": 101}
    gradients = check(found, ledger, layout=LEAF_SPINE)[2]
    assert gradients["agree"] is None
    assert "2 of those may have been control" in gradients["note"]
    assert check(found, ledger | {"sent": 99}, layout=LEAF_SPINE)[2]["agree"] is False


def test_training_takes_hosts_of_each_leaf_in_turn():
    assert [host.name for host in LEAF_SPINE.spread(3)] == ["host0", "host2", "host1"]
    assert LAYOUT.spread(3) == LAYOUT.hosts


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
