# SPDX-License-Identifier: Apache-2.0
"""The compiled text for a whole switch: a batch of packets through ingress, queues, egress and lines.

The decisions are those of the generated ``ingress`` and ``egress``; `dlcp.switch.scheduler` has the queues and lines.
"""

import inspect
from typing import Final

from dlcp.switch import scheduler
from dlcp.switch.codegen.layout import FLAT
from dlcp.switch.codegen.source import DROP_PORT, Generated
from dlcp.switch.queues import SERVE_EVERY_PACKETS

_POOL: Final = "rows, slots, carry, spare, ports, totals, out"

_SERVE: Final = """
@njit(nogil=True)
def serve(now_ns, {pool}{egress_more}):
    wake = NEVER_NS
    for place in range(ports.shape[0]):
        port = ports[place]
        if port[BUSY] == 0 and port[LINE_HEAD] < 0:
            continue
        slot = dequeue(port, slots, now_ns)
        while slot >= 0:
            # FREE_NS still is when the packet left its queue.
            start_us, enq_us = port[FREE_NS] // 1000, slots[slot, ENQUEUED_NS] // 1000
            depth = port[WAITING + slots[slot, QUEUE]]
            if not egress(
                rows[slot], slots[slot, LENGTH], ({carried},),
                port[NUMBER], enq_us, start_us - enq_us, slots[slot, ENQ_DEPTH], depth, start_us{egress_more}
            ):
                discard(port, slots, slot)
                give_back(spare, slot)
            elif not transmit(port, slots, slot):
                give_back(spare, slot)
            slot = dequeue(port, slots, now_ns)
        if hand_over(port, slots, out[place], now_ns):
            totals[READY] += 1
            totals[READY + totals[READY]] = place
        due = wake_ns(port, slots)
        if due < wake:
            wake = due
    totals[WAKE_NS] = wake
    if now_ns > totals[TREATED_NS]:
        totals[TREATED_NS] = now_ns


@njit(nogil=True, cache=CACHE)
def forward(until_ns, arrived, count, places, {pool}, {state}):
{unfold}    if until_ns - totals[WAKE_NS] > totals[LATE_NS]:
        totals[LATE_NS] = until_ns - totals[WAKE_NS]
    for i in range(count + 1):
        now_ns = until_ns
        if i < count:
            now_ns = max(min(arrived[i, CAME_NS], until_ns), totals[TREATED_NS])
        # One call for all, or all that is behind it would be compiled once more.
        if totals[WAKE_NS] < now_ns or totals[WAKE_NS] == now_ns and (i == count or i % {serve_every} == 0):
            serve(now_ns, {pool}{egress_more})
        if i == count:
            break
        totals[TREATED_NS] = now_ns
        slot = arrived[i, SLOT]
        slots[slot, LENGTH] = arrived[i, BYTES]
        port = ports[arrived[i, PLACE]]
        if port[LOSS] and loses(port):
            port[LOST_ARRIVING] += 1
            give_back(spare, slot)
            continue
        egress_port, queue, kept = ingress(
            rows[slot], slots[slot, LENGTH], port[NUMBER], now_ns // 1000{ingress_more}
        )
        if egress_port == {drop_port}:
            port[INGRESS_DROPS] += 1
            give_back(spare, slot)
            continue
        place = places[egress_port]
        if place < 0:
            totals[NO_PORT] += 1
            give_back(spare, slot)
            continue
        if not enqueue(ports[place], slots, slot, queue, now_ns):
            give_back(spare, slot)
            continue
{keep}        due = wake_ns(ports[place], slots)
        if due < totals[WAKE_NS]:
            totals[WAKE_NS] = due
"""


def forwarding(generated: Generated) -> str:
    """Return the text of ``forward``, which goes behind ``generated.compiled()``.

    ``forward(until_ns, arrived, count, places, ..., state)`` takes in the first ``count`` rows of ``arrived`` in order,
    and lets everything depart that is due, up to ``until_ns``. A packet that came before the one in front of it, or
    before what has been treated already, is treated as if it had come then. ``places`` leads from a port's number to
    its place, -1 for no such port.
    """
    ingress, egress = generated.used(generated.ingress), generated.used(generated.egress)
    indices = range(len(generated.carry))
    constants = "".join(f"{name} = {value}\n" for name, value in scheduler.CONSTANTS.items())
    functions = "\n".join(f"@njit(nogil=True)\n{inspect.getsource(item)}\n" for item in scheduler.COMPILED)
    text = _SERVE.format(
        pool=_POOL,
        state=", ".join(("structures", *FLAT)),
        unfold=generated.unfold([*ingress, *(name for name in egress if name not in ingress)]),
        carried=", ".join(f"carry[slot, {k}]" for k in indices),
        keep="".join(f"        carry[slot, {k}] = kept[{k}]\n" for k in indices),
        ingress_more="".join(f", {name}" for name in ingress),
        egress_more="".join(f", {name}" for name in egress),
        drop_port=DROP_PORT,
        serve_every=SERVE_EVERY_PACKETS,
    )
    return f"\n\n{constants}\n\n{functions}\n{text}"
