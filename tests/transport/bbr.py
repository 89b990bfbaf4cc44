# SPDX-License-Identifier: Apache-2.0
"""BBR, as Linux has it (version 1; Cardwell et al., ACM Queue 14(5), 2016), for tests to compete with.

It paces at the most that was delivered in ten round trips, keeps no more than twice the idle path's packets on the way,
probes for more in one round of eight, and for a shorter round trip every ten seconds; losses it ignores.
"""

from collections import deque

STARTUP_GAIN = 2.885
"""2 / ln 2: doubles the packets sent each round."""
CYCLE = (1.25, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
FULL_GROWTH, FULL_ROUNDS = 1.25, 3
BANDWIDTH_ROUNDS = 10
SHORTEST_MEMORY_S = 10.0
PROBE_RTT_S, PROBE_RTT_PACKETS = 0.2, 4.0


class BbrWindow:
    """A window and a pace; wants a report for every acknowledgement."""

    ecn_capable = False
    slow_start = True

    def __init__(self):
        self.window, self.weight = 10.0, 1.0
        self.pace = 0.0
        """Packets a second; 0 while no round trip is known."""
        self._gain, self._state = STARTUP_GAIN, "startup"
        self._shortest_s, self._shortest_at_s = float("inf"), 0.0
        self._total = 0
        self._acked = deque([(0.0, 0)])
        self._rates = deque(maxlen=BANDWIDTH_ROUNDS)
        self._round_s = self._phase_s = 0.0
        self._phase = 2
        self._full, self._full_rounds = 0.0, 0
        self._resume_s = 0.0

    def on_report(self, report):
        now_s, rtt_s = report.now_s, report.rtt_s
        self._total += report.delivered
        if not report.delivered:
            return
        self._acked.append((now_s, self._total))
        while len(self._acked) > 2 and self._acked[1][0] <= now_s - rtt_s:
            self._acked.popleft()
        since_s, before = self._acked[0]
        rate = (self._total - before) / max(now_s - since_s, rtt_s)
        expired = now_s - self._shortest_at_s > SHORTEST_MEMORY_S
        if rtt_s <= self._shortest_s or expired:
            self._shortest_s, self._shortest_at_s = rtt_s, now_s
        if now_s >= self._round_s:
            self._round_s = now_s + rtt_s
            self._rates.append(rate)
            self._end_round()
        self._rates[-1] = max(self._rates[-1], rate)
        self._move(now_s, rtt_s, expired)
        bandwidth = max(self._rates)
        self.pace = self._gain * bandwidth
        if self._state == "probe rtt":
            self.window = PROBE_RTT_PACKETS
        else:
            gain = STARTUP_GAIN if self._state in ("startup", "drain") else 2.0
            self.window = max(PROBE_RTT_PACKETS, gain * bandwidth * self._shortest_s)

    def on_timeout(self):
        """Losses say nothing to it."""

    def _end_round(self):
        if self._state != "startup":
            return
        best = max(self._rates)
        if best >= FULL_GROWTH * self._full:
            self._full, self._full_rounds = best, 0
            return
        self._full_rounds += 1
        if self._full_rounds >= FULL_ROUNDS:
            self._state, self._gain = "drain", 1 / STARTUP_GAIN

    def _move(self, now_s, rtt_s, expired):
        if self._state == "probe rtt":
            if now_s >= self._resume_s:
                self._shortest_at_s = now_s
                self._cruise(now_s)
        elif expired and self._state == "probe bandwidth":
            self._state, self._gain = "probe rtt", 1.0
            self._resume_s = now_s + PROBE_RTT_S + rtt_s
        elif self._state == "drain":
            if rtt_s <= 1.05 * self._shortest_s or now_s > self._phase_s + 20 * rtt_s > 20 * rtt_s:
                self._cruise(now_s)
        elif self._state == "probe bandwidth" and now_s - self._phase_s > self._shortest_s:
            self._phase = (self._phase + 1) % len(CYCLE)
            self._phase_s, self._gain = now_s, CYCLE[self._phase]

    def _cruise(self, now_s):
        self._state, self._phase, self._phase_s, self._gain = "probe bandwidth", 2, now_s, 1.0
