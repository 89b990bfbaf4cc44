# SPDX-License-Identifier: Apache-2.0
"""Rules that both engines share: the dispatch to each transport's own rules, timers, and completion of messages.

`dlcp.sim.transports.specs` has the transports' own rules, and documents their parameters.
"""

from collections.abc import Callable, Sequence
from typing import Any

from dlcp.sim.engines.network_tables import OWN_KIND, PROFILE_CELLS, TRANSPORTS, BufferScope, Discipline
from dlcp.sim.jit import shared
from dlcp.sim.limits import FOREVER_PS
from dlcp.sim.rows import Row
from dlcp.sim.transports.plugins import OWN_DISCIPLINES
from dlcp.sim.transports.specs import TIMEOUT_BACKOFF_MAX, OwnTransport, never

# ---------------------------------------------------------------------------------------- the rules of each transport


def chosen(name: str, kind: str, parameters: str, rules: Sequence[Callable[..., Any]], arguments: str = "") -> Any:
    """Return a function that calls the rule of a kind, which is an expression of its parameters.

    Compiled code cannot look up functions, so this writes the comparisons. A rule without any is the last one's.
    """
    arguments = arguments or parameters
    lines = [f"def {name}({parameters}):"]
    lines += [
        f"    if {kind} == {number}:\n        return rules_{number}({arguments})"
        for number, rule in enumerate(rules)
        if rule is not rules[-1]
    ]
    found: dict[str, Any] = {f"rules_{number}": shared(rule) for number, rule in enumerate(rules)}
    exec("\n".join([*lines, f"    return rules_{len(rules) - 1}({arguments})"]), found)
    return shared(found[name])


def of_transport(name: str, parameters: str) -> Any:
    """Return a function that calls the rule of a stream's transport, by default `specs.OwnTransport`'s."""
    return chosen(name, "t.kind", parameters, [getattr(each, name) for each in (*TRANSPORTS, OwnTransport)])


on_ack = of_transport("on_ack", "s, t, marked, rtt, number, now, limited")
change_on_nack = of_transport("on_nack", "s, t, rtt, now")
change_on_loss = of_transport("on_loss", "s, t, number, now")
change_on_timeout = of_transport("on_timeout", "s, t")
timeout_ps = of_transport("timeout_ps", "s, t")
queue_of = of_transport("queue_of", "s, t, m, index")
on_begin = of_transport("on_begin", "s, t, m")
add_backlog = of_transport("add_backlog", "s, t, packets")
may_pull = of_transport("may_pull", "s, t, m, wanted, trimmed")
give_credit = of_transport("give_credit", "s, t, spare")
queue_after_pull = of_transport("queue_after_pull", "s, t, spare")
credit_ps = of_transport("credit_ps", "s, t, credit, packet_ps")
on_pull = of_transport("on_pull", "s, t, granted")
own_admission = chosen(
    "own_admission",
    f"discipline - {OWN_KIND}",
    "discipline, x, own, waiting, waiting_bytes, port_bytes, chance",
    [*(each.admit for each in OWN_DISCIPLINES.values()), never],
    "x, own, waiting, waiting_bytes, port_bytes, chance",
)
"""Return the verdict of a discipline of another package; see `dlcp.sim.network.disciplines`."""


# -------------------------------------------------------------------------------------------------- congestion windows


@shared
def measure_rtt(s: Row, t: Row, rtt: int) -> None:
    """Update the estimates with a round-trip time in picoseconds (RFC 6298, gains of 1/8 and 1/4)."""
    if s.rtt == 0:
        s.rtt = rtt
        s.rtt_var = rtt >> 1
        s.rtt_min = rtt
    else:
        difference = rtt - s.rtt
        s.rtt += difference >> 3
        if difference < 0:
            difference = -difference
        s.rtt_var += (difference - s.rtt_var) >> 2
        s.rtt_min = min(s.rtt_min, rtt)


@shared
def is_limited(s: Row) -> int:
    """Return whether the window limits the sender.

    In slow start, using half of the window counts: the link may be the limit, and growth must not stop (as in Linux).
    """
    reach = 2 * s.in_flight if s.window < s.threshold else s.in_flight + 1
    return reach >= int(s.window)


@shared
def on_loss(s: Row, t: Row, number: int, now: int) -> None:
    """Shrink the window after the loss of packet ``number``."""
    if t.every_loss == 0:
        if number < s.recover:
            return
        s.recover = s.number
    change_on_loss(s, t, number, now)


@shared
def on_nack(s: Row, t: Row, number: int, rtt: int, now: int) -> None:
    """Handle the NACK of packet ``number``, which was trimmed. As a sign of congestion, DLCP takes it for a mark."""
    if s.tail_probing != 0 and number == s.tail_number:
        s.tail_probing = 0  # the probe has overtaken the packets before it, so its NACK does not show their loss
    if t.is_dlcp != 0:
        on_ack(s, t, 1, rtt, number, now, is_limited(s))
    change_on_nack(s, t, rtt, now)


@shared
def on_timeout(s: Row, t: Row) -> None:
    """Shrink the window and back off after a timeout."""
    s.recover = s.number
    s.tail_probing = 0
    s.spare = 0
    if s.backoff < t.backoff_max:
        s.backoff += 1
    change_on_timeout(s, t)


@shared
def leave_probe_mode(s: Row) -> None:
    """Send data instead of probes again (pFabric), after any answer."""
    if s.probe_mode != 0:
        s.probe_mode = 0
        s.backoff = 0


@shared
def window_is_open(s: Row, t: Row) -> int:
    """Return whether a stream may have one more packet in flight."""
    if t.credited != 0:
        return s.credit > 0
    return s.in_flight < int(s.window) + s.spare and s.probe_mode == 0


@shared
def needs_reply(s: Row, t: Row) -> int:
    """Return whether a stream with data to send has to wait for a PULL or for a reply to a probe."""
    return s.probe_mode != 0 or (t.credited != 0 and s.credit <= 0)


@shared
def restart_timers(s: Row, t: Row, now: int) -> None:
    """Restart the timeout and the tail probe timer of a stream, after something arrived."""
    s.deadline = now + timeout_ps(s, t)
    restart_tail_timer(s, t, now)


@shared
def restart_tail_timer(s: Row, t: Row, now: int) -> None:
    """Restart the tail probe timer of a stream, or stop it where no probe is allowed (RFC 8985, section 7.2)."""
    s.tail_due = FOREVER_PS
    if t.tail_probe != 0 and s.rtt > 0 and s.repairing == 0 and s.tail_probing == 0:
        s.tail_due = now + 2 * s.rtt


@shared
def begin_tail_probe(s: Row, t: Row, now: int) -> None:
    """Allow one packet beyond the window. Its acknowledgement will show what was lost before it."""
    s.tail_probing = 1
    s.tail_number = s.number
    s.spare = 1
    restart_timers(s, t, now)


# -------------------------------------------------------------------------------------------------------------- packets


@shared
def protected_packets(zeros: int, count: int) -> int:
    """Return how many of ``count`` packets are in class 0, which has ``zeros`` cells of the drop-class profile."""
    return (zeros * count + PROFILE_CELLS // 2) // PROFILE_CELLS


@shared
def packet_bytes(t: Row, m: Row, index: int) -> int:
    """Return the size of a message's packet, headers included."""
    return t.header_bytes + (m.last_bytes if index == m.packets - 1 else t.payload)


@shared
def packet_hash(s: Row, t: Row, m: Row, index: int, number: int, retransmission: int) -> int:
    """Return the path hash of a stream's packet ``number``. A retransmission gets another path than before.

    Ultra Ethernet's entropies take turns, in an order that changes each time: all of them, exclusive-or one that is
    drawn by Fibonacci hashing.
    """
    if t.sprayed == 0:
        return s.path_hash
    if t.entropies == 0:
        return sprayed_hash(s.path_hash, index + m.step + retransmission)
    order = (((s.path_hash + number // t.entropies) * 40503) & 0xFFFF) * t.entropies >> 16
    return sprayed_hash(s.path_hash, (number ^ order) & (t.entropies - 1))


@shared
def sprayed_hash(path_hash: int, number: int) -> int:
    """Return the hash that chooses a sprayed packet's path: its flow's plus its number, as in p4/v1model/route.p4."""
    return (path_hash + number) & 0xFFFFFFFF


@shared
def on_send(s: Row, t: Row, m: Row, now: int) -> None:
    """Count a packet as in flight, and restart the stream's timers.

    The timeout starts with the oldest packet in flight. Acknowledgements restart it; further packets do not.
    """
    s.number += 1
    s.spare = 0
    s.in_flight += 1
    if s.in_flight == 1:
        restart_timers(s, t, now)
    else:
        restart_tail_timer(s, t, now)
    if t.credited != 0:
        s.credit -= 1
    add_backlog(s, t, -1)
    m.in_flight += 1
    m.sent += 1
    m.refs += 1


@shared
def wanted_credit(s: Row, t: Row) -> int:
    """Return the pull target that a packet carries: how many packets of credit its sender wants in total (RCCC)."""
    wanted = min(s.backlog, int(t.max_window_packets)) - s.credit
    if s.speculating != 0 and s.backlog > 0:
        wanted = max(1, wanted)
    return s.pulled + wanted


# ------------------------------------------------------------------------------------------------------------- messages


@shared
def has_enough(m: Row) -> int:
    """Return whether a receiver's loss bound is met: it may do without the missing packets."""
    return m.protected == 0 and m.received >= m.required


@shared
def is_complete(t: Row, m: Row) -> int:
    """Return whether a receiver needs no more packets: all have arrived, or the loss bound lets it stop now.

    It waits for packets that may still arrive, unless ``immediate``: until it knows that all others are given up, or
    until the sender probes.
    """
    if m.received == m.packets:
        return True
    waits = t.immediate == 0 and m.probed == 0 and m.received + m.given_up < m.packets
    return m.bounded != 0 and not waits and has_enough(m)


@shared
def may_stay_lost(m: Row, drop_class: int, trimmed: int) -> int:
    """Return whether a sender leaves a lost packet a hole, instead of sending it again at once.

    A packet that was ``trimmed`` is lost for certain, so it is one within the loss bound only.
    """
    if m.satisfied != 0:
        return True
    return m.bounded != 0 and drop_class != 0 and (trimmed == 0 or m.holes < m.packets - m.required)


@shared
def may_probe(m: Row) -> int:
    """Return whether a sender has to probe the receiver: every packet is sent and answered, and holes remain."""
    if m.holes == 0 or m.satisfied != 0 or m.probing != 0:
        return False
    return m.in_flight == 0 and m.retransmits == 0 and m.next_index >= m.packets


@shared
def on_probe(s: Row, t: Row, m: Row, now: int) -> None:
    """Wait for a receiver's reply to a probe, and schedule the next probe in case none comes."""
    m.probing = 1
    m.probe_at = now + (timeout_ps(s, t) << m.probe_backoff)


@shared
def on_probe_timeout(s: Row, t: Row, m: Row, now: int) -> None:
    """Back off if no reply has come, and allow another probe."""
    if m.probing != 0 and m.probe_backoff < TIMEOUT_BACKOFF_MAX:
        m.probe_backoff += 1
    m.probing = 0
    m.probe_at = now + timeout_ps(s, t)


@shared
def on_probe_reply(s: Row, t: Row, m: Row, satisfied: int) -> int:
    """Stop if the receiver needs no more, otherwise send the holes again. A pFabric flow leaves probe mode.

    Returns whether the message has to be put into its stream's list again.
    """
    m.probing = 0
    m.probe_backoff = 0
    if satisfied != 0:
        m.satisfied = 1
    if t.probe_after_timeouts != 0:
        leave_probe_mode(s)
        return False
    if m.satisfied != 0:
        return False
    m.filling_holes = 1
    m.next_index = 0
    return m.listed == 0


@shared
def may_close(m: Row) -> int:
    """Return whether a message is done and nothing refers to it any more.

    The rows of a closed graph are freed at once. So before that no packet or timer (``refs``), no transmission
    (``in_flight``, ``retransmits``) and no stream's list (``listed``) may refer to any of its messages.
    """
    if m.closed != 0 or m.done == 0 or m.refs != 0 or m.in_flight != 0 or m.retransmits != 0 or m.listed != 0:
        return False
    return m.acked >= m.packets or m.satisfied != 0


# ------------------------------------------------------------------------------------------------------------- switches


@shared
def is_full(rules: Row, queue_packets: int, queue_bytes: int, port_bytes: int, switch_bytes: int, size: int) -> int:
    """Return whether a queue has no room for ``size`` bytes, given what waits in it, at its port, and in its switch.

    With DLCP an empty queue always has room: the program assumes that a tail-dropped packet has others before it.
    """
    if rules.discipline == Discipline.DLCP and queue_packets == 0:
        return False
    if rules.discipline == Discipline.PFABRIC:
        return queue_packets >= rules.limit_packets
    limit = rules.limit_bytes
    if rules.buffer == BufferScope.QUEUE:
        return queue_bytes + size > limit
    if rules.buffer == BufferScope.PORT:
        return port_bytes + size > limit
    free = limit - switch_bytes
    return size > free or (port_bytes + size) * 1024 > rules.alpha_1024 * free
