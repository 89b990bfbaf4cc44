# SPDX-License-Identifier: Apache-2.0
import itertools
import json
import threading

import numpy as np
import pytest

from dlcp.transport import BoundExceededError, Delivery, LossBound, MessageKey
from dlcp.transport.ledger import Ledger, add_up, as_json, coded
from dlcp.values.planes import PlaneLayout
from dlcp.values.tags import PacketTags

PACKETS = 20


def tags(drop_class=(7,) * PACKETS, layer=(3,) * PACKETS, protected=(False,) * PACKETS):
    return PacketTags(
        np.full(len(layer), 4, np.uint8),
        np.array(drop_class, np.uint8),
        np.array(layer, np.uint8),
        np.array(protected, np.bool_),
    )


def delivery(lost=(), *, packets=PACKETS, sent=None, resent=0):
    delivered = np.ones(packets, np.bool_)
    delivered[list(lost)] = False
    sent = packets + resent if sent is None else sent
    return Delivery(delivered, sent, resent, 0.25)


def test_totals_add_up_over_messages():
    ledger = Ledger()
    bound = LossBound(0.2)
    ledger.record(MessageKey(0, 0), 1, "conv1", tags(), bound, delivery([1, 2]))
    ledger.record(MessageKey(0, 1), 2, "conv2", tags(), bound, delivery(resent=3))
    ledger.record(MessageKey(1, 0), 1, "conv1", tags(), bound, delivery([5], resent=1))
    summary = ledger.summary()
    assert (summary["sent"], summary["delivered"], summary["lost"], summary["retransmitted"]) == (64, 57, 3, 4)
    assert summary["max_message_ratio"] == pytest.approx(2 / PACKETS)
    assert summary["violations"] == 0
    json.dumps(summary)


def test_losses_are_counted_by_class_and_by_layer():
    ledger = Ledger()
    drop_class = np.arange(PACKETS) % 8
    layer = np.repeat([0, 255], PACKETS // 2)
    ledger.record(MessageKey(0, 0), 1, "all", tags(drop_class, layer), LossBound(0.3), delivery([7, 15, 6]))
    by_class = np.array(ledger.summary()["by_class"])
    assert by_class[:, 0].tolist() == np.bincount(drop_class).tolist()
    assert by_class[:, 1].tolist() == [0, 0, 0, 0, 0, 0, 1, 2]
    assert ledger.summary()["by_layer"] == {"0": [10, 2, 0], "255": [10, 1, 0]}


def test_what_is_counted_many_messages_at_a_time_adds_up(monkeypatch):
    monkeypatch.setattr("dlcp.transport.ledger.COUNTED_TOGETHER", 2 * PACKETS)
    ledger = Ledger()
    waiting = []
    for number in range(5):
        layer = (number,) * PACKETS
        ledger.record(MessageKey(0, number), 1, "all", tags(layer=layer), LossBound(0.1), delivery([number % 2]))
        waiting.append(sum(map(len, ledger._uncounted)))
    assert waiting == [1, 0, 1, 0, 1], "what waits to be counted does not grow"
    assert list(ledger.summary()["by_layer"].values()) == [[PACKETS, 1, 0]] * 5
    assert ledger.summary()["by_class"][7] == [5 * PACKETS, 5, 0]
    assert ledger.summary()["by_class"][7] == [5 * PACKETS, 5, 0], "once"


def test_packets_are_counted_by_precision():
    ledger = Ledger()
    assert ledger.latest_bits() == 32
    bits = ([8, 32], [8, 8], [32, 32], [32, 32])
    latest = []
    for step, number in itertools.product(range(len(bits)), range(2)):
        key, layer, precision = MessageKey(step, number), [number] * PACKETS, bits[step][number]
        layout = PlaneLayout(9999, precision, 1440) if precision < 32 else None
        ledger.record(key, 1, "fc", tags(layer=layer), LossBound(0.1), delivery([step % 2]), layout)
        latest.append(ledger.latest_bits())
    assert latest == [8, 8, 8, 8, 8, 8, 32, 32], "small messages are not encoded, so one says little"
    summary = ledger.summary()
    assert summary["by_bits"] == {"8": [3 * PACKETS, 3], "32": [5 * PACKETS, 5]}
    assert coded(summary["by_bits"]) == {"8": [3 * PACKETS, 3]}
    assert summary["by_layer"] == {"0": [4 * PACKETS, 4, 2 * PACKETS], "1": [4 * PACKETS, 4, PACKETS]}
    assert summary["by_class"][7][2] == 3 * PACKETS


def test_the_bound_itself_is_kept_and_one_packet_more_breaks_it():
    ledger = Ledger(job=7)
    bound = LossBound(0.1)
    ledger.record(MessageKey(4, 0), 1, "layer4.conv2", tags(), bound, delivery([0, 1]))
    with pytest.raises(BoundExceededError, match=r"job 7, step 5: rank 3 got 85\.0% of layer4\.conv2 \(bound 90\.0%\)"):
        ledger.record(MessageKey(5, 0), 3, "layer4.conv2", tags(), bound, delivery([0, 1, 2]))
    assert ledger.violations == 1
    assert ledger.summary()["violations"] == 1
    assert ledger.summary()["lost"] == 5, "a message that broke its bound is entered nevertheless"
    assert len(ledger.records) == 2


def test_a_lost_protected_packet_breaks_any_bound():
    ledger = Ledger()
    protected = np.arange(PACKETS) == 4
    ledger.record(MessageKey(0, 0), 1, "bias", tags(protected=protected), LossBound(0.5), delivery([3, 5]))
    with pytest.raises(BoundExceededError, match="protected packets lost: 1"):
        ledger.record(MessageKey(0, 1), 1, "bias", tags(protected=protected), LossBound(0.5), delivery([4]))
    assert ledger.violations == 1


def test_records_say_what_became_of_each_message():
    written = []
    ledger = Ledger(keep=3, sink=written.append)
    for step in range(5):
        ledger.record(MessageKey(step, 9), 2, "fc", tags(), LossBound(0.1), delivery([0], resent=2))
    assert [entry.step for entry in ledger.records] == [2, 3, 4]
    assert [entry.step for entry in written] == list(range(5))
    assert as_json(written[0]) == {
        "step": 0,
        "message": 9,
        "receiver": 2,
        "layers": "fc",
        "packets": PACKETS,
        "sent": PACKETS + 2,
        "retransmitted": 2,
        "delivered": PACKETS - 1,
        "recovered": 2,
        "lost": 1,
        "bound": 0.1,
        "seconds": 0.25,
        "bits": 32,
    }


def test_records_and_summary_call_one_thing_by_one_name():
    ledger = Ledger()
    record = ledger.record(MessageKey(0, 0), 1, "fc", tags(), LossBound(0.1), delivery(resent=2))
    shared = set(as_json(record)) & set(ledger.summary())
    assert shared == {"sent", "delivered", "lost", "retransmitted"}
    assert all(as_json(record)[name] == ledger.summary()[name] for name in shared)


def test_entries_from_several_threads_are_all_counted():
    ledger = Ledger()

    def enter():
        for step in range(200):
            ledger.record(MessageKey(step, 0), 1, "fc", tags(), LossBound(0.1), delivery([3]))

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert ledger.summary()["lost"] == 800
    assert ledger.summary()["by_class"][7] == [800 * PACKETS, 800, 0]


def test_ledgers_of_several_ranks_add_up():
    one = {
        "sent": 5,
        "delivered": 4,
        "lost": 1,
        "retransmitted": 0,
        "violations": 0,
        "extra": 2,
        "max_message_ratio": 0.2,
    }
    one |= {"by_class": [[5, 1, 3]] + [[0, 0, 0]] * 7, "by_layer": {"0": [5, 1, 3]}}
    one |= {"by_bits": {"32": [2, 0], "8": [3, 1]}}
    other = one | {"violations": 1, "max_message_ratio": 0.1, "by_layer": {"12": [3, 0, 0], "0": [2, 1, 1]}}
    other |= {"by_bits": {"4": [1, 0], "8": [4, 0]}}
    total = add_up([one, other])
    assert (total["sent"], total["lost"], total["violations"], total["max_message_ratio"]) == (10, 2, 1, 0.2)
    assert total["by_class"] == [[10, 2, 6]] + [[0, 0, 0]] * 7
    assert total["by_layer"] == {"0": [7, 2, 4], "12": [3, 0, 0]}
    assert list(total["by_bits"].items()) == [("4", [1, 0]), ("8", [7, 1]), ("32", [2, 0])]
    assert add_up([])["sent"] == 0
