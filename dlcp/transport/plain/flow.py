# SPDX-License-Identifier: Apache-2.0
"""Everything on its way to one peer: its window, its round-trip time, what of it is lost, and acknowledgements.

``dlcp/native/flow.c`` in NumPy.

Packets count as lost when one that was sent later on the same path into the same queue has arrived, by more than the
disorder to be expected (RACK, RFC 8985, kept per queue because strict priority reorders across queues, and per path
because delays differ). A path on which nothing arrives at all is judged by the others, with patience, and left.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator

import numpy as np

from dlcp.transport.congestion import Report
from dlcp.transport.engine import ACK_RECENT, RULES, SEGMENTS_MAX
from dlcp.transport.messages import MessageKey
from dlcp.transport.plain.incoming import PlainIncoming
from dlcp.transport.plain.outgoing import FLYING, Indices, PlainOutgoing
from dlcp.transport.plain.path import PlainPath, PlainPaths, counted_since
from dlcp.wire import ACK_BLOCK_PACKETS, ACK_ENTRY, ACK_PATH, ACK_WHOLE, Header

_QUEUES = 8
_BURST_BYTES_MAX = 65000
_CLOCK = 1 << 32
"""Microseconds after which a time on the wire begins anew."""

Emit = Callable[[PlainOutgoing, Indices, int], bool]
"""Sends packets of a message in one burst on a path; False if the socket is full."""


FRESH_COMPARED = 4


class Acknowledgements:
    """What is to be acknowledged to one peer."""

    def __init__(self) -> None:
        self.marked_received = 0
        self.newest_s = 0.0
        self._late_s = math.inf
        self._last_s = 0.0
        self._packets = 0
        self._fresh: list[tuple[PlainIncoming, int]] = []
        self._recent: deque[tuple[PlainIncoming, int]] = deque(maxlen=ACK_RECENT)
        self._marked_on: Counter[int] = Counter()
        self._marked_paths: set[int] = set()
        """Paths that have had more marks than were told."""

    def note_marked(self, path: int, packets: int) -> None:
        """Note that packets came marked on a path."""
        self._marked_on[path] += packets
        self._marked_paths.add(path)

    def note(self, message: PlainIncoming, indices: Indices, marked: bool, now_s: float) -> None:
        """Note that data arrived, be it for the first time or again."""
        if not self._packets:
            self._late_s = now_s + RULES["ack_delay_s"]
        self._packets += len(indices)
        self.marked_received += len(indices) * marked
        self.newest_s = now_s
        for block in np.unique(indices // ACK_BLOCK_PACKETS).tolist():
            self._note_block(message, block)

    def note_whole(self, message: PlainIncoming) -> None:
        """Note that all of a message is here and complete."""
        self._packets = max(1, self._packets)
        self._note_block(message, (message.packets - 1) // ACK_BLOCK_PACKETS)

    def _note_block(self, message: PlainIncoming, block: int) -> None:
        # As good as all of them: packets of a block come one after the other.
        if (message, block) not in self._fresh[-FRESH_COMPARED:]:
            self._fresh.append((message, block))

    def drop(self, message: PlainIncoming) -> None:
        """Tell nothing of a message any more."""
        self._fresh = [value for value in self._fresh if value[0] is not message]
        self._recent = deque((value for value in self._recent if value[0] is not message), ACK_RECENT)

    def due_s(self, smoothed_rtt_s: float) -> float:
        """Return when an acknowledgement must leave; infinity if there is nothing to acknowledge."""
        if self._packets >= RULES["ack_at_once"]:
            return 0.0
        if self._packets >= RULES["ack_every"]:
            spacing_s = max(RULES["ack_spacing_s"], smoothed_rtt_s * RULES["ack_round_trips"])
            return min(self._late_s, self._last_s + spacing_s)
        return self._late_s

    @property
    def waiting(self) -> bool:
        """Whether there is anything to acknowledge."""
        return self._packets > 0

    def take(self, payload_bytes: int, by_path: bool, now_s: float) -> Iterator[bytes]:
        """Return the payloads of what is to be sent now, with marks ``by_path`` if the sender uses several."""
        limit = payload_bytes // ACK_ENTRY.size
        fresh, self._fresh = self._fresh, []
        self._packets = 0
        self._late_s = math.inf
        self._last_s = now_s
        while fresh:
            repeated = list(self._recent)[: limit - 1]
            room = limit - len(repeated)
            entries = repeated + fresh[:room]
            self._recent = deque(fresh[:room], ACK_RECENT)
            fresh = fresh[room:]
            told = sorted(self._marked_paths)[: limit - len(entries)] if by_path else []
            self._marked_paths -= set(told)
            marks = [ACK_ENTRY.pack(path, 0, ACK_PATH, self._marked_on[path] & 0xFFFFFFFF) for path in told]
            yield b"".join([_entry(*entry) for entry in entries] + marks)


def _entry(message: PlainIncoming, block: int) -> bytes:
    there = message.delivered[block * ACK_BLOCK_PACKETS : (block + 1) * ACK_BLOCK_PACKETS]
    bits = int.from_bytes(np.packbits(there, bitorder="little").tobytes(), "little")
    whole = ACK_WHOLE if message.complete and message.arrived == message.packets else 0
    return ACK_ENTRY.pack(message.key.step, message.key.message, block | whole, bits)


def indices_of(block: int, bits: int) -> Indices:
    """Return the packets that an entry names."""
    there = np.unpackbits(np.frombuffer(bits.to_bytes(8, "little"), np.uint8), bitorder="little")
    return (np.flatnonzero(there) + block * ACK_BLOCK_PACKETS).astype(np.uint32)


class PlainFlow:
    """See :class:`dlcp.transport.engine.Flow`."""

    def __init__(self, now_s: float, packet_bytes: int) -> None:
        self.window = 1.0
        self.largest_window = 1
        self.burst = SEGMENTS_MAX
        self.slow_start = True
        self.pace = math.inf
        self.mute = False
        self.heard_s = now_s
        self.answered_s = 0.0
        """The longest that the peer took to answer a question; of use until a round trip is known."""
        self.flying = 0
        self.smoothed_rtt_s = self.rtt_variation_s = 0.0
        self.messages: dict[MessageKey, PlainOutgoing] = {}
        self._packets_max = max(1, _BURST_BYTES_MAX // packet_bytes)
        self.look_s = 0.0
        """When to look next which messages to ask about, if none falls idle before."""
        self._delivered = self._marked = self._lost = 0
        self._clocks_us = -1
        """What clocks differ by, and the first packet took; below 0: not known."""
        self._limited = False
        self._reported_s = 0.0
        self._disorder = RULES["disorder_min"]
        self._newest_delivered_s = [-1.0] * _QUEUES
        """Into each queue, on any path."""
        self.paths = PlainPaths()
        self._excused_lost = self._excused_marked = 0
        """On paths that are left or on trial: the window has no part in it."""
        self._stalled_due_s = 0.0
        """When to look next for paths on which nothing arrives."""
        self._sent_last_s = 0.0
        self._paced_s = 0.0
        """For how long the pace allows nothing, after what has left."""
        self._held = False
        """Whether packets wait for that."""
        self._marked_seen = 0

    @property
    def _paused_until_s(self) -> float:
        """When a window of less than a packet admits the next one."""
        return self._sent_last_s + self.smoothed_rtt_s / min(1.0, self.window)

    def resumes_s(self, now_s: float) -> float:
        """Return when time alone lets the next packet go; infinity if none waits, or for something else, too."""
        if self.window < 1:
            until_s = math.inf if self.flying else self._paused_until_s
        else:
            until_s = self._paced_s if self._held else math.inf
        return until_s if self.messages and until_s > now_s else math.inf

    @property
    def probe_timeout_s(self) -> float:
        """How long to wait for news before asking."""
        if not self.smoothed_rtt_s:
            return max(4 * RULES["probe_timeout_min_s"], self.answered_s)
        timeout_s = self.smoothed_rtt_s + 4 * self.rtt_variation_s
        if len(self.paths) > 1:  # a question must not overtake what it is about
            timeout_s = max([timeout_s, *(2 * path.delay_s for path in self.paths if path.flying)])
        most_s = max(RULES["probe_timeout_max_s"], 2 * self.smoothed_rtt_s)
        return min(most_s, max(RULES["probe_timeout_min_s"], timeout_s))

    @property
    def report_due_s(self) -> float:
        """When the next report may be taken; infinity if there is nothing to report."""
        if not self._delivered and not self._lost:
            return float("inf")
        hurry = self._lost or self._marked or (self._limited and self.slow_start)
        return self._reported_s + max(RULES["report_min_s"] if hurry else RULES["report_calm_s"], self.smoothed_rtt_s)

    def take_report(self, now_s: float) -> Report | None:
        """Return what came back since the last report, or None if it is too early for the next: half its time."""
        if now_s < (self._reported_s + self.report_due_s) / 2:
            return None
        rtt_s, one_way_s = self._report_times()
        report = Report(
            now_s, self._delivered, self._marked, self._lost, rtt_s, self.smoothed_rtt_s, self._limited, one_way_s
        )
        self._delivered = self._marked = self._lost = 0
        self._limited = False
        self._reported_s = now_s
        return report

    def marked_since(self, total: int) -> int:
        """Return how many packets arrived marked since the last call; ``total`` is of all so far, modulo 2**32."""
        marked = counted_since(self._marked_seen, total)
        if marked:
            self._marked_seen = total
        return marked

    def take_marks(self, number: int, total: int) -> None:
        """Take in how many packets have come marked on a path so far, modulo 2**32."""
        if number < len(self.paths):
            marked = self.paths[number].take_marks(total)
            self._excused_marked += marked * self.paths[number].excused

    def remove(self, message: PlainOutgoing) -> None:
        """Forget a message."""
        if self.messages.get(message.key) is message:
            del self.messages[message.key]
            for number in message.path[message.state == FLYING].tolist():
                self.paths[number].flying -= 1
            self.flying -= message.drop()

    def pump(self, now_s: float, emit: Emit) -> int:
        """Send one burst, the most urgent packets first; return how many packets, or -1 if the socket is full."""
        message = None if self.mute else self._most_urgent()
        if message is None:
            return 0
        room = self._room(now_s)
        if room <= 0:
            self._limited |= self.window < self.largest_window
            return 0
        self._held = now_s < self._paced_s - (0 if self._held else RULES["pace_turn_s"])
        if self._held:
            return 0
        paced = max(self.pace * RULES["pace_turn_s"], RULES["path_burst"])
        limit = int(max(1, min(room, self.burst, SEGMENTS_MAX, self._packets_max, paced)))
        number, limit = self.paths.choose(self._usable_window, limit, now_s)
        chosen, again = message.gather(limit)
        if again:
            message.mark_resent(chosen)
        if not emit(message, chosen, number):
            return -1
        message.note_sent(chosen, again, number, now_s)
        path = self.paths[number]
        path.runs[message.tags[chosen[0], 1] >> 5].append((now_s, message, chosen))
        self.flying += len(chosen)
        path.flying += len(chosen)
        path.sent += len(chosen)
        self.paths.last = number
        self._sent_last_s = now_s
        self._paced_s = max(self._paced_s, now_s - RULES["pace_turn_s"]) + len(chosen) / self.pace
        return len(chosen)

    @property
    def _usable_window(self) -> float:
        return min(self.window, self.largest_window)

    def _room(self, now_s: float) -> int:
        if self.window < 1:
            return int(self.flying == 0 and now_s >= self._paused_until_s)
        return int(self._usable_window) - self.flying

    def _most_urgent(self) -> PlainOutgoing | None:
        """Return the message of the most urgent queue; in it the layer nearest the input; then who came first."""
        best, best_rank = None, -1
        for message in self.messages.values():
            if message.unsent:
                _, queue, layer, _ = message.tags[message.next_packet()].tolist()
                rank = (queue >> 5) << 8 | (255 - layer)
                if rank > best_rank:
                    best, best_rank = message, rank
        return best

    def land(self, message: PlainOutgoing, indices: Indices, now_s: float) -> None:
        """Note that packets arrived."""
        self._count_landed(message, indices)
        flew, late = message.land(indices, now_s)
        self.flying -= flew
        if late:
            # They were late, not lost: over-share packets, say, that waited in a lower queue.
            self._disorder = min(RULES["disorder_max"], self._disorder * 2**late)

    def _count_landed(self, message: PlainOutgoing, indices: Indices) -> None:
        numbers, queues, flew = message.path[indices], message.tags[indices, 1] >> 5, message.state[indices] == FLYING
        for number in np.unique(numbers).tolist():
            path, here = self.paths[number], numbers == number
            landed = int(np.count_nonzero(flew & here))
            path.flying -= landed
            path.judged += landed
            path.lost -= int(np.count_nonzero(here)) - landed
            self.paths.fresh.add(number)
            for queue in np.unique(queues[here]).tolist():
                newest_s = float(message.sent_s[indices[here & (queues == queue)]].max())
                path.newest_delivered_s[queue] = max(path.newest_delivered_s[queue], newest_s)
                self._newest_delivered_s[queue] = max(self._newest_delivered_s[queue], newest_s)

    def lose(self, message: PlainOutgoing, indices: Indices) -> None:
        """Note that flying packets are lost."""
        message.lose(indices)
        self.flying -= len(indices)
        numbers, counts = np.unique(message.path[indices], return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            path = self.paths[number]
            path.flying -= count
            path.judged += count
            path.lost += count
            self._excused_lost += count * path.excused
            self.paths.fresh.add(number)

    def sample_paths(self, sampled: dict[int, float], header: Header, now_s: float) -> None:
        """Take in round trips: by path, when the newest packet that has arrived was sent, of those sent once."""
        ago_s = header.step * 1e-6
        total_s, paths = 0.0, 0
        for number, sent_s in sorted(sampled.items()):
            path, rtt_s = self.paths[number], max(now_s - sent_s - ago_s, 1e-6)
            path.sample_delay(rtt_s)
            if not path.excused:
                path.samples.append((rtt_s, self._one_way_s(header.index, sent_s)))
                total_s += rtt_s
                paths += 1
        if paths:
            self._smooth_rtt(total_s / paths)

    def _report_times(self) -> tuple[float, float]:
        """Return the shortest round trip and the shortest way there since the last report, as means over paths."""
        samples, rtt_s, one_way_s = 0, 0.0, 0.0
        for path in self.paths:
            if path.samples:
                samples += len(path.samples)
                rtt_s += len(path.samples) * min(each for each, _ in path.samples)
                one_way_s += len(path.samples) * min(each for _, each in path.samples)
                path.samples = []
        return (rtt_s / samples, one_way_s / samples) if samples else (0.0, math.inf)

    def _one_way_s(self, arrived_us: int, sent_s: float) -> float:
        """Return how long a packet took, but for what the clocks differ by; ``arrived_us`` is modulo 2**32."""
        took_us = arrived_us - int(sent_s * 1e6)
        if self._clocks_us < 0:
            self._clocks_us = took_us % _CLOCK
        beyond_us = (took_us - self._clocks_us + _CLOCK // 2) % _CLOCK - _CLOCK // 2
        return beyond_us * 1e-6

    def _smooth_rtt(self, rtt_s: float) -> None:
        if not self.smoothed_rtt_s:
            self.smoothed_rtt_s, self.rtt_variation_s = rtt_s, rtt_s / 2
            return
        self.rtt_variation_s += (abs(self.smoothed_rtt_s - rtt_s) - self.rtt_variation_s) / 4
        self.smoothed_rtt_s += (rtt_s - self.smoothed_rtt_s) / 8

    def feed_back(self, delivered: int, marked: int, lost: int, now_s: float) -> None:
        """Note what came back, for the next report."""
        if delivered:
            lost += self._find_lost(now_s)
        self.paths.judge(self._usable_window, now_s)
        if not delivered and not lost:
            return
        self._delivered += delivered
        self._lost += lost - min(lost, self._excused_lost)
        self._marked += min(marked - min(marked, self._excused_marked), delivered)
        self._excused_lost = self._excused_marked = 0
        for message in self.messages.values():
            idle = not message.unsent and not message.flying and message.delivered < message.to_send
            if idle and not message.idle_noticed:
                message.idle_noticed = True
                self.look_s = 0.0  # ask at once

    def _find_lost(self, now_s: float) -> int:
        disorder_s = max(RULES["reorder_min_s"], self.smoothed_rtt_s * self._disorder)
        stalled_s = disorder_s + max(RULES["path_stalled_s"], 2 * self.smoothed_rtt_s)
        lost = 0
        for path in [self.paths[number] for number in sorted(self.paths.fresh)]:
            for queue in range(_QUEUES):
                lost += self._lose_until(path, queue, path.newest_delivered_s[queue] - disorder_s)
        if len(self.paths) > 1 and now_s >= self._stalled_due_s:
            self._stalled_due_s = now_s + RULES["path_stalled_s"] / 4
            for path in self.paths:
                for queue in range(_QUEUES):
                    if path.flying:
                        lost += self._lose_stalled(path, queue, stalled_s, now_s)
        if lost:
            self._disorder = max(RULES["disorder_min"], self._disorder * RULES["disorder_decay"])
        return lost

    def _lose_until(self, path: PlainPath, queue: int, until_s: float) -> int:
        """Find what of one queue of a path is lost: what was sent before a time."""
        runs, lost = path.runs[queue], 0
        while runs and (runs[0][0] < until_s or runs[0][1].key not in self.messages):
            sent_s, message, indices = runs.popleft()
            gone = indices[(message.state[indices] == FLYING) & (message.sent_s[indices] == sent_s)]
            if len(gone):
                self.lose(message, gone)
                lost += len(gone)
        return lost

    def _lose_stalled(self, path: PlainPath, queue: int, stalled_s: float, now_s: float) -> int:
        """Find what of a path is lost by what has arrived much later on others; leave it if nothing arrives there."""
        until_s = self._newest_delivered_s[queue] - max(stalled_s, 2 * path.delay_s)
        lost = self._lose_until(path, queue, until_s)
        if lost >= RULES["path_burst"] and path.newest_delivered_s[queue] < until_s:
            if not path.excused:
                self._excused_lost += lost
            self.paths.leave(path, now_s)
        return lost
