# SPDX-License-Identifier: Apache-2.0
"""Find links between switches that lose packets without reporting it, by the counters at both ends.

What has left one port and not arrived at the other was lost on the link. The two counters cannot be read at the same
moment. So arrivals are read twice, before and after departures: compared with the first, too many packets seem lost by
those under way, compared with the second, too few by those that came meanwhile. The truth is in between. A longer
interval brings the two estimates closer together; it ends when they lead to the same conclusion.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median_low
from typing import Final, NamedTuple

from dlcp.controller.fabric import Fabric, Port

_LOSSY: Final = 0.01
"""Share of lost packets above which a link is avoided: well below usual loss bounds, well above what cables lose."""
_LOSSIER: Final = 2.0
"""The share must also exceed this many times what most other links lose: switches that are short of processor time lose
packets at all ports."""
_DEAD: Final = 0.5
"""A link that loses more is bad, whatever others lose."""
_CERTAIN: Final = 4.0
"""An interval ends once the estimates differ by less than this part of the limit, even if the limit is in between."""
_LOST_MIN: Final = 10
_SENT_MIN: Final = 200
"""Fewest packets for the conclusion that a link is bad, or that it is good. Not tuned."""
_PATIENCE_S: Final = 10.0
_PATIENCE_MAX_S: Final = 600.0
"""Time until an avoided link is tried again. It doubles each time that the link is found bad, up to the second, and
starts anew if the link has been good for as long."""

Counts = Mapping[Port, int]
"""Packets at each port, as read from the switches that answer."""


class _Reading(NamedTuple):
    """Departures at one end of a link, and arrivals at the other, read before and after them."""

    sent: int
    before: int
    after: int


class _Span(NamedTuple):
    """An interval of one direction: its end, the packets sent, and the least and the most that were lost."""

    end: _Reading
    sent: int
    least: int
    most: int

    @property
    def lost(self) -> float:
        """The share of packets that were lost at least."""
        return max(0, self.least) / self.sent if self.sent else 0.0

    def conclusion(self, limit: float) -> bool | None:
        """Return whether the direction loses more than a share; None as long as nothing can be said."""
        allowed = self.sent * limit
        if self.least > allowed and self.least >= _LOST_MIN:
            return True
        is_certain = self.most <= allowed or (self.most - self.least) * _CERTAIN < allowed
        return False if self.sent >= _SENT_MIN and self.least <= allowed and is_certain else None


@dataclass
class _Suspect:
    """A link that has been found bad: the directions (ports of departure) that were, and when to try it again."""

    bad: set[Port]
    again_s: float
    on_trial: bool = False
    good: set[Port] = field(default_factory=set)


@dataclass
class LinkLosses:
    """The losses of all links between switches of a fabric.

    Attributes
    ----------
    shares
        Share of the packets that left a port and did not arrive at the other end, in the last interval that allowed a
        conclusion; by the port of departure.
    """

    fabric: Fabric
    shares: dict[Port, float] = field(default_factory=dict)
    _began: dict[Port, _Reading] = field(default_factory=dict)
    _suspects: dict[Port, _Suspect] = field(default_factory=dict)
    """By the link's lesser port."""
    _patience_s: dict[Port, tuple[float, float]] = field(default_factory=dict)
    """How long to avoid a link when it is found bad again, and when to forget that it was."""

    def __post_init__(self) -> None:
        """Find the directions of all links."""
        self._directions = {
            Port(switch, number): neighbour.port
            for switch, ports in self.fabric.neighbours.items()
            for number, neighbour in ports.items()
            if neighbour.port is not None
        }

    @cached_property
    def ports(self) -> Mapping[str, list[int]]:
        """The ports whose counters are needed, by switch."""
        found: dict[str, list[int]] = {name: [] for name in self.fabric.neighbours}
        for port in self._directions:
            found[port.switch].append(port.number)
        return found

    @property
    def suspects(self) -> list[tuple[Port, Port]]:
        """The links that have been found bad and not yet good again, the worst first."""
        found = [self._ends(link) for link in self._suspects]
        return sorted(found, key=lambda ends: -max(self.shares.get(end, 0) for end in ends))

    @property
    def on_trial(self) -> frozenset[Port]:
        """The ports at both ends of links that should carry few packets, to see whether they still lose some."""
        return frozenset(end for link, each in self._suspects.items() if each.on_trial for end in self._ends(link))

    def note(self, before: Counts, sent: Counts, after: Counts) -> list[str]:
        """Note arrivals, then departures, then arrivals again; return what has changed, one line per link."""
        spans = {}
        for start, end in self._directions.items():
            is_read = end in before and start in sent and end in after
            if is_read and after[end] >= before[end]:  # else a switch has restarted in between
                spans[start] = self._span(start, _Reading(sent[start], before[end], after[end]))
            else:
                self._began.pop(start, None)
        said = []
        for start, span in spans.items():
            bad = span.conclusion(_LOSSY)
            if bad:
                others = [
                    each.lost
                    for end, each in spans.items()
                    if each.sent and end not in (start, self._directions[start])
                ]
                bad = span.conclusion(min(_DEAD, _LOSSY + _LOSSIER * median_low([0.0, *others])))
            if bad is not None:
                self.shares[start] = span.lost
                self._began[start] = span.end
                said += self._judge(start, bad)
        return said + self._trials()

    def _span(self, start: Port, now: _Reading) -> _Span:
        began = self._began.setdefault(start, now)
        if now.sent < began.sent or now.before < began.before:  # a switch has restarted
            began = self._began[start] = now
        least = now.sent - now.after - (began.sent - began.before)
        most = now.sent - now.before - (began.sent - began.after)
        return _Span(now, now.sent - began.sent, least, most)

    def _trials(self) -> list[str]:
        """Begin the trials that are due."""
        due = [
            link
            for link, suspect in self._suspects.items()
            if not suspect.on_trial and time.monotonic() >= suspect.again_s
        ]
        for link in due:
            self._suspects[link].on_trial = True
            for end in self._ends(link):
                self._began.pop(end, None)
        return [f"link {self._name(link)} is tried again with few packets" for link in due]

    def _judge(self, start: Port, bad: bool) -> list[str]:
        link = min(start, self._directions[start])
        suspect = self._suspects.get(link)
        if bad and (suspect is None or suspect.on_trial):
            now_s = time.monotonic()
            patience_s, forget_s = self._patience_s.get(link, (_PATIENCE_S, math.inf))
            if now_s > forget_s:
                patience_s = _PATIENCE_S
            again_s = now_s + patience_s
            self._patience_s[link] = min(2 * patience_s, _PATIENCE_MAX_S), again_s + _PATIENCE_MAX_S
            self._suspects[link] = _Suspect({start, *(suspect.bad if suspect else ())}, again_s)
            return [f"link {self._name(link)} loses {self.shares[start]:.1%} of the packets from {start}"]
        if bad and suspect:
            suspect.bad.add(start)
        elif suspect and suspect.on_trial:
            suspect.good.add(start)
            if suspect.good >= suspect.bad:
                del self._suspects[link]
                return [f"link {self._name(link)} is good again"]
        return []

    def _ends(self, link: Port) -> tuple[Port, Port]:
        return link, self._directions[link]

    def _name(self, link: Port) -> str:
        return " - ".join(map(str, self._ends(link)))
