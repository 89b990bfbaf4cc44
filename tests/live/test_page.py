# SPDX-License-Identifier: Apache-2.0
"""The live page in a real browser, at two sizes, light and dark: its content and fit, and no requests."""

import os
import re
import struct
import zlib
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="the live page takes the packages of the extra live")

from dlcp.live import http_server as module
from dlcp.live.http_server import LiveServer
from dlcp.report.style import COLOURS
from tests.live.browser import CHROMIUM, Browser
from tests.live.snapshots import snapshot, write
from tests.waiting import until

if CHROMIUM is None:
    pytest.skip("a browser is needed: apt-get install chromium", allow_module_level=True)

pytestmark = pytest.mark.timeout(600)
SIZES = {"wide": (1200, 800), "narrow": (400, 800)}
HOSTILE = "<img src=x onerror=alert(1)>\"'&"
SHOTS = os.environ.get("DLCP_SCREENSHOTS")
"""A folder where screenshots are left for people to look at."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def watched(tmp_path, browser, monkeypatch):
    """A page that is open, and a way to let ranks tell something, which returns once the page shows it."""
    monkeypatch.setattr(module, "REFRESH_S", 0.02)
    monkeypatch.setattr(module, "QUIET_S", 0.1)
    browser.requests.clear()
    browser.complaints.clear()
    with ExitStack() as stack:
        server = stack.enter_context(LiveServer([tmp_path], "0"))
        stack.callback(server.training_is_over)
        browser.look_like(*SIZES["wide"], dark=False)
        browser.open(server.url)
        until(lambda: "Waiting for the first rank to report" in text(browser, "headline"))
        yield Watched(server, tmp_path, browser, stack)
        assert browser.complaints == []
        assert {url for url in browser.requests if not url.startswith("data:")} == {server.url, f"{server.url}events"}


class Watched:
    def __init__(self, server, folder, browser, stack):
        self.server, self.folder, self.browser, self.stack = server, folder, browser, stack

    def tell(self, *snapshots, every_s=1000.0):
        """Show what ranks tell that write so often: seldom, lest they count as silent on a busy machine."""
        write(self.folder, *(each | {"every_s": every_s} for each in snapshots))
        told = [[each["rank"], each["step"]] for each in snapshots]
        shown = "state.sessions.some(s => s.members.some(m => m.rank === rank && m.step === step))"
        until(lambda: self.browser.evaluate(f"{told}.every(([rank, step]) => {shown})"))

    def train(self, ranks=4, points=6, **changes):
        for steps in range(1, points + 1):
            self.tell(*(snapshot(rank, ranks=ranks, steps=steps, **changes) for rank in range(ranks)))
        until(lambda: self.browser.evaluate("state.sessions[0].history.length") > 1)


def text(browser, name):
    """Return what a reader sees of a part of the page; spaces are spaces."""
    return browser.evaluate(f"document.getElementById({name!r})?.innerText ?? ''").replace("\u00a0", " ")


def pixels(png):
    """Return the corner's colour of a PNG of eight bits a channel."""
    data, at, packed = png, 8, b""
    while at < len(data):
        (length,) = struct.unpack_from(">I", data, at)
        kind = data[at + 4 : at + 8]
        if kind == b"IHDR":
            depth, colours = data[at + 16], data[at + 17]
        elif kind == b"IDAT":
            packed += data[at + 8 : at + 8 + length]
        at += 12 + length
    assert depth == 8
    assert colours in (2, 6)
    return zlib.decompress(packed)[1:4]  # the first pixel of the first line, which no filter changes


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_it_shows_training_and_fits(watched, browser, tmp_path, size, dark):
    browser.look_like(*SIZES[size], dark)
    watched.train()
    browser.evaluate("draw()")
    assert re.search(r"Step \d: 100 ms per step, 20 % of it waiting", text(browser, "headline"))
    assert re.search(r"Rank \d waits longest: 20 ms per step, 18 ms of it for rank \d\.", text(browser, "second"))
    assert text(browser, "kicker").startswith("DLCP, live · 4 ranks on node0 · as of ")
    cards = text(browser, "cards")
    for word in (
        "80 ms computing, 20 ms waiting",
        "at most 8 % of one message, 10 % allowed",
        "80 Mbit/s",
        "60 % of the lost held lower digits only",
        "8 bits",
        "60 % of all packets so far had fewer bits of each value",
    ):
        assert word in cards
    assert text(browser, "ranks").count("over DLCP") == 4
    assert "blocks.0.attention … blocks.0.mlp" in text(browser, "layers")
    assert text(browser, "layers").count("50 %") == 3, "of a layer's packets, those with fewer bits"
    assert browser.evaluate("document.querySelectorAll('#encoded path').length") == 1
    assert text(browser, "paths").count("80 Mbit/s") == 12
    assert browser.evaluate("document.getElementById('note').hidden")
    assert browser.evaluate("document.querySelectorAll('#waiting svg g').length") == 4 * 5
    assert browser.evaluate("document.querySelectorAll('#steps path').length") == 4
    assert browser.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0], "only tables scroll sideways"
    overlapping = """[...document.querySelectorAll('#steps svg')].flatMap(svg => {
      const boxes = [...svg.querySelectorAll('text')].map(text => text.getBoundingClientRect());
      return boxes.filter((a, i) => boxes.some((b, j) => j > i && a.left < b.right && b.left < a.right
        && a.top < b.bottom && b.top < a.bottom));
    }).length"""
    assert browser.evaluate(overlapping) == 0, "of the plot's texts none lies on another"
    shot = Path(SHOTS or tmp_path) / f"live-{size}-{'dark' if dark else 'light'}.png"
    browser.screenshot(shot)
    assert pixels(shot.read_bytes()).hex() == COLOURS["paper"][dark][1:]


def test_it_follows_training_to_its_end(watched, browser):
    watched.train(points=3)
    assert text(browser, "headline").startswith("Step 3")
    watched.tell(*(snapshot(rank, ranks=4, steps=9) for rank in range(4)))
    until(lambda: text(browser, "headline").startswith("Step 9"))
    watched.tell(*(snapshot(rank, ranks=4, steps=10, ended=True) for rank in range(4)))
    watched.stack.close()
    until(lambda: text(browser, "headline") == "Training has ended, at step 10")
    assert text(browser, "second") == "All steps went over DLCP."
    assert browser.evaluate("document.getElementById('note').hidden")


def test_it_says_who_is_slow_over_whatever_averages(watched, browser, tmp_path):
    slow = {"text": "rank 2 makes the others wait 38 ms", "steps": 9, "step_s": 0.1, "network_s": 0.0, "layers": ""}
    slow |= {"rank": 2, "peer": None, "cause": "computing", "lost_s": 0.038}
    nothing = {"by_bits": {}, "packets": {}, "layers": [], "peers": {}, "fallback": "gloo", "phase": "watched"}
    spent = {"loading": 0.01, "forward": 0.2, "evaluation": 0.0, "waiting": 0.3}
    for steps in (9, 10, 11):
        activities = {name: steps * each for name, each in spent.items()}
        told = {"slow": slow, "activities_s": activities, **nothing}
        watched.tell(*(snapshot(rank, ranks=4, steps=steps, **told) for rank in range(4)))
    until(lambda: text(browser, "slow") == "Who is slow: rank 2 makes the others wait 38 ms.")
    assert text(browser, "activities").split()[:8] == ["Rank", "loading", "forward", "waiting", "0", "10", "ms", "200"]
    assert "Averaged by" in text(browser, "cards")
    assert "Lost for its step" not in text(browser, "cards")
    assert text(browser, "ranks").count("watched") == 4
    assert "Packets sent" not in text(browser, "ranks")
    browser.screenshot(Path(SHOTS or tmp_path) / "live-watched.png")
    watched.tell(*(snapshot(rank, ranks=4, steps=12, **nothing) for rank in range(4)))
    until(lambda: browser.evaluate("document.getElementById('slow').hidden"))


def test_it_says_which_route_the_ranks_have_chosen(watched, browser):
    route = {"route": "framework since step 3: gloo 101 ms a step, DLCP 118 ms", "framework_steps": 6}
    watched.tell(*(snapshot(rank, ranks=4, steps=9, **route) for rank in range(4)))
    until(lambda: text(browser, "second").endswith("Route: framework since step 3: gloo 101 ms a step, DLCP 118 ms."))
    watched.tell(*(snapshot(rank, ranks=4, steps=10, ended=True, **route) for rank in range(4)))
    watched.stack.close()
    until(lambda: text(browser, "second").startswith("5 of 11 steps went over DLCP."))


def test_it_says_who_came_and_went(watched, browser):
    went = {"step": 4, "ranks": [0, 1], "text": "rank 2 has ended. Training goes on after 0.30 s", "stood_s": 0.3}
    came = {"step": 8, "ranks": [0, 1, 3], "text": "from step 8 on, 3 ranks take part", "stood_s": 0.0}
    watched.tell(*(snapshot(rank, ranks=3, steps=3) for rank in range(3)))
    left = {"changes": [went], "ranks": [0, 1], "stood_s": 0.3}
    watched.tell(*(snapshot(rank, ranks=3, steps=6) | left for rank in (0, 1)))
    until(lambda: "Step 4: rank 2 has ended. Training goes on after 0.30 s." in text(browser, "note"))
    assert "2 ranks on" in text(browser, "kicker")
    left |= {"changes": [went, came], "ranks": [0, 1, 3]}
    watched.tell(*(snapshot(rank, ranks=4, steps=9) | left for rank in (0, 1, 3)))
    until(lambda: "Step 8: from step 8 on, 3 ranks take part." in text(browser, "note"))
    assert "3 ranks on" in text(browser, "kicker")


def test_it_says_why_dlcp_is_off_who_gave_up_and_who_is_silent(watched, browser):
    off = {"phase": "fallback", "reason": "rank 2 has been silent; is the path up?", "peers": {}}
    why = "DLCP is off: rank 2 has been silent; is the path up? Training continues with the framework's own all-reduce."
    watched.tell(*(snapshot(rank, ranks=4, steps=5, **off) for rank in range(4)))
    until(lambda: text(browser, "note") == why)
    until(lambda: text(browser, "ranks").count("DLCP is off") == 4)
    watched.tell(snapshot(3, ranks=4, steps=6, ended=True, gave_up="out of memory"))
    until(lambda: "Rank 3: gave up: out of memory" in text(browser, "note"))
    watched.tell(*(snapshot(rank, ranks=4, steps=7, **off) for rank in range(3)), every_s=0.1)
    until(lambda: "Ranks 0, 1 and 2 have been silent for " in text(browser, "note"))
    watched.stack.close()
    until(lambda: "Ranks 0, 1 and 2 ended without a report." in text(browser, "note"))


def test_what_ranks_say_is_text_whatever_it_is(watched, browser):
    names = [[0, [HOSTILE], 10, 1, 0]]
    watched.tell(snapshot(0, steps=3, host=HOSTILE, session=HOSTILE, layers=names), snapshot(1, steps=3, session="b"))
    watched.tell(snapshot(1, steps=4, session=HOSTILE, phase="failed", reason=HOSTILE, host=HOSTILE))
    until(lambda: HOSTILE in text(browser, "note"))
    for place in ("kicker", "ranks", "layers"):
        until(lambda place=place: HOSTILE in text(browser, place))
    assert browser.evaluate("document.querySelectorAll('img').length") == 0


def test_of_several_sessions_the_reader_chooses_one(watched, browser):
    watched.tell(snapshot(0, steps=3, session="first"), snapshot(1, steps=4, session="second", began_unix_s=1.8e9))
    until(lambda: text(browser, "headline").startswith("Step 4"))
    browser.evaluate("at('session').value = 'first'; at('session').dispatchEvent(new Event('change'))")
    until(lambda: text(browser, "headline").startswith("Step 3"))


def test_many_ranks_and_layers_are_cut_to_what_matters(watched, browser):
    layers = [[place, [f"layer{place}"], 100, place % 50, 0] for place in range(200)]
    watched.train(ranks=40, points=2, layers=layers)
    browser.evaluate("draw()")
    assert browser.evaluate("document.querySelectorAll('#waiting svg').length") == 0
    assert "The 32 of 200 layers with the most packets lost." in text(browser, "layers")
    assert "The 32 slowest of 1,560." in text(browser, "paths")
    assert browser.evaluate("document.documentElement.scrollWidth") <= SIZES["wide"][0]


def test_when_the_server_is_gone_it_says_so(watched, browser):
    watched.tell(snapshot(0, steps=3), snapshot(1, steps=3))
    watched.server.training_is_over = lambda: None
    watched.stack.pop_all()
    watched.server.__exit__(None, None, None)
    until(lambda: "this page's server has ended" in text(browser, "note"))
    assert text(browser, "headline").startswith("Step 3"), "what was known stays"
