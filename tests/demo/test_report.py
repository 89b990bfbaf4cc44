# SPDX-License-Identifier: Apache-2.0
import html.parser
import itertools
import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from dlcp.report import page as report
from dlcp.report import style
from dlcp.report.page import HUES, MOST_POINTS, binned, draw_all, drop_shares
from dlcp.report.runs import fair_share_ratio, summarize
from dlcp.report.style import COLOURS
from tests.demo.synthetic_runs import make_runs
from tests.report.phones import readable_px

FIGURES = {
    "accuracy",
    "steps",
    "waiting",
    "background",
    "drops",
    "loss_by_class",
    "loss_by_layer",
    "bound",
    "layers",
}


class Page(html.parser.HTMLParser):
    """Collects a page's tags, attributes, ids and text; fails on a tag that is not closed."""

    VOID = {"meta", "br", "hr", "img", "link"}  # noqa: RUF012

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.ids, self.text, self.open = set(), set(), set(), [], []
        self.feed(text)
        assert self.open == []
        self.text = " ".join(" ".join(self.text).replace("\u00a0", " ").split())

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.ids |= {value for name, value in attrs if name == "id"}
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.text.append(data)


def write(runs, folder):
    """Write the report on runs into a folder; return the folder."""
    return report.write_report(runs, summarize(runs), folder).parent


def page_of(runs, folder):
    return Page((write(runs, folder) / "report.html").read_text())


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    """The folder of the report on the runs that ``runs`` returns; drawing its figures takes a second."""
    return write(make_runs(steps=60), tmp_path_factory.mktemp("usual"))


@pytest.fixture(scope="module")
def drawn():
    """The figures on these runs."""
    runs = make_runs(steps=60)
    return draw_all(runs, summarize(runs))


def test_the_page_holds_every_figure_and_how_to_make_it_again(runs, drawn, usual):
    page = Page((usual / "report.html").read_text())
    summary = summarize(runs)
    assert page.ids >= FIGURES
    for figure in drawn.values():
        assert figure.caption.replace("\u00a0", " ") in page.text
        assert figure.caption.endswith(".")
    assert style.sentence("headline", summary).replace("\u00a0", " ") in page.text
    for fact in (runs["dlcp"]["program_digest"], "dlcp demo --seed 1", "2.13.0", "6.1.0", "identical", "never broken"):
        assert fact in page.text
    for name in style.SHORT_NAMES.values():
        assert name in page.text
    assert {path.stem for path in usual.glob("*.svg")} == FIGURES


def test_the_page_needs_nothing_but_itself(usual):
    text = (usual / "report.html").read_text()
    page = Page(text)
    assert page.tags & {"script", "link", "iframe", "img", "object", "embed", "image"} == set()
    assert page.attributes & {"src", "xlink:href", "srcset", "onclick", "onload"} == set()
    # Marks of plots refer to their shape, which the same plot defines.
    assert set(re.findall(r'href="([^"]*)"', text)) <= {f"#{name}" for name in page.ids}
    assert re.findall(r"https?:|//[a-z]+\.|url\(|@import", text) == []
    assert len(text) < 400_000
    assert readable_px(text, plots=len(FIGURES)) < 800


def test_figures_are_files_of_their_own(usual):
    for name in FIGURES:
        text = (usual / f"{name}.svg").read_text()
        root = ElementTree.fromstring(text)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert [child.tag.partition("}")[2] for child in root][:3] == ["title", "style", "desc"]
        namespaces = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
        assert set(re.findall(r"https?://[^\"' <]+", text)) == namespaces
        assert "nan" not in text.lower()


def test_drawings_stay_within_their_frames(drawn):
    for plot in drawn.values():
        width, height = (float(size) for size in re.search(r'viewBox="0 0 (\S+) (\S+)"', plot.inline).groups())
        corners = re.findall(
            r"[ML] (-?[.\d]+) (-?[.\d]+)", re.sub(r"<defs>.*?</defs>", "", plot.inline, flags=re.DOTALL)
        )
        places = re.findall(r'<(?:text|use)[^>]* x="([-.\d]+)" y="([-.\d]+)"', plot.inline)
        assert len(places) > 4
        assert len(corners) > 5
        for x, y in [*corners, *places]:
            assert 0 <= float(x) <= width
            assert 0 <= float(y) <= height


def test_the_same_runs_give_the_same_page(runs, usual, tmp_path):
    texts = [(folder / "report.html").read_text() for folder in (usual, write(runs, tmp_path))]
    assert texts[0] == texts[1]
    assert "matplotlib" not in texts[0].lower()


def test_marks_say_what_they_show(runs, drawn):
    curve = runs["gloo"]["curve"]
    tips = re.findall(r"<title>(.*?)</title>", drawn["accuracy"].inline)
    assert len([tip for tip in tips if tip.startswith("Gloo: ")]) == len(curve)
    packets, lost, *_ = runs["dlcp"]["ledger"]["by_class"][7]
    assert f"DLCP, class 7: {lost:,} of {packets:,} packets lost" in drawn["loss_by_class"].inline
    for plot in drawn.values():
        assert f'role="img" aria-label="{plot.title}"' in plot.inline
        assert "var(--" in plot.inline
        assert not re.search(r"#[0-9a-f]{6}", re.sub(r'"#m[0-9a-f]+"', "", plot.inline)), "a colour of no mode"


def test_without_gloo_the_page_says_so_and_why_it_matters(tmp_path):
    runs = make_runs(steps=60, gloo=False)
    for run in runs.values():
        run["fabric"]["kind"] = "loopback"
    page = page_of(runs, tmp_path)
    assert "There is no run with Gloo here" in page.text
    assert "network namespaces, and there were none" in page.text
    assert "in place of TCP" in page.text
    assert "than Gloo" not in page.text
    assert "as fast as Gloo" not in page.text
    assert page.ids >= FIGURES


def test_with_gloo_there_is_no_excuse(usual):
    assert "There is no run with Gloo" not in Page((usual / "report.html").read_text()).text


def test_precision_is_told_with_what_loss_then_means(usual):
    text = Page((usual / "report.html").read_text()).text
    assert "60 % of all packets had fewer bits of each value" in text
    assert "Of the packets that DLCP sent, 60 % had 8 bits of each value; the others had all." in text
    assert "Of the lost packets, 75 % held lower digits only" in text


def test_a_slower_dlcp_is_called_slower(runs, tmp_path):
    for point in runs["dlcp"]["curve"]:
        point["seconds"] *= 10
    summary = summarize(runs)
    assert summary["speedup_over_gloo"] < 1
    assert "longer than Gloo took" in style.sentence("headline", summary)
    assert "longer than its plain transport took" in style.sentence("headline", summary)
    assert "times as fast" not in style.sentence("headline", summary)
    page_of(runs, tmp_path)


def test_broken_bounds_and_different_replicas_cannot_be_overlooked(runs, tmp_path):
    runs["dlcp"]["ledger"] |= {"violations": 3, "max_message_ratio": 0.4}
    runs["dlcp"]["replicas_identical"] = False
    text = page_of(runs, tmp_path).text
    assert "the bound was broken 3 times" in text
    assert "3 BROKE the bound" in text
    assert "NOT identical" in text
    assert "DIFFERENT" in text


def background(runs):
    return style.sentence("background", {name: fair_share_ratio(run) for name, run in runs.items()})


def test_a_starved_background_is_admitted(runs):
    assert "did not starve it" in background(runs)
    runs["dlcp"]["background"]["bps"] = 1e7
    sentence = background(runs)
    assert "did not starve" not in sentence
    assert "part of the difference in time came from there" in sentence
    runs["gloo"]["background"]["bps"] = 1e7
    assert "no less than beside Gloo" in background(runs)


def test_a_run_without_drops_loss_or_layer_times_still_has_a_page(runs, tmp_path):
    for run in runs.values():
        run["layer_seconds"] = None
        run["compute_seconds"] = []
        run["background"]["samples"] = []
        run["switch"] |= {"tail_drops": 0, "policy_drops": 0, "by_queue": {}}
        if run["ledger"]:
            run["ledger"] |= {"lost": 0, "max_message_ratio": 0.0, "by_class": [[10, 0, 0]] * 8}
            run["ledger"] |= {"by_layer": {"0": [9, 0, 0]}, "by_bits": {"32": [80, 0]}}
    page = page_of(runs, tmp_path)
    assert page.ids >= FIGURES - {"layers"}
    assert "layers" not in page.ids
    assert "Nothing was lost." in page.text
    assert "all had all bits of each value." in page.text
    assert "is not known for these runs" in page.text


def test_runs_without_a_common_accuracy_still_have_a_page(runs, tmp_path):
    for point in runs["plain"]["curve"]:
        point["accuracy"] = 0.1
    page = page_of(runs, tmp_path)
    assert "No accuracy was held by every run" in page.text
    assert "never" in page.text


def test_names_from_files_are_escaped(runs, tmp_path):
    for run in runs.values():
        run["command"] = "dlcp demo <script>alert(1)</script>"
        run["layer_names"]["57"] = "<img src=x>"
    page = page_of(runs, tmp_path)
    assert page.tags & {"script", "img"} == set()
    assert "<script>alert(1)</script>" in page.text


def test_the_command_makes_summary_and_page_again(runs, tmp_path, capsys):
    (tmp_path / "runs").mkdir()
    for name, run in runs.items():
        (tmp_path / "runs" / f"{name}.json").write_text(json.dumps(run))
    assert report.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    assert json.loads((tmp_path / "summary.json").read_text()) == summarize(runs)
    (tmp_path / "runs" / "dlcp.json").unlink()
    assert report.main([str(tmp_path)]) == 1
    assert "run 'dlcp' is missing" in capsys.readouterr().err


def test_drop_shares_by_hand():
    queues = {"1": {"tail_drops": 30}, "0": {"tail_drops": 10}, "6": {"tail_drops": 10}}
    switch = {"forwarded": 900, "tail_drops": 50, "policy_drops": 50, "by_queue": queues}
    assert drop_shares({"switch": switch}) == (0.05, 0.02, 0.03)


def test_binned_rates_keep_what_was_sent_and_show_gaps():
    samples = [(0.1 * (i + 1), 10.0) for i in range(10)] + [(0.1 * (i + 1), 10.0) for i in range(20, 30)]
    points = binned(samples, 3.0)
    assert len(points) == 30
    assert [bps for _, bps in points] == [10.0] * 10 + [0.0] * 10 + [10.0] * 10
    long = [(0.1 * (i + 1), float(i % 7)) for i in range(5000)]
    points = binned(long, 500.0)
    assert len(points) <= MOST_POINTS
    assert sum(bps for _, bps in points) * 17 == pytest.approx(sum(bps for _, bps in long))


def test_numbers_as_people_read_them():
    assert [style.duration(s).replace("\u00a0", " ") for s in (0.0042, 0.5361, 1.2345, 29.54, 112.6, None)] == [
        "4.2 ms",
        "536 ms",
        "1.23 s",
        "29.5 s",
        "113 s",
        "never",
    ]
    assert [style.percent(p).replace("\u00a0", " ") for p in (0.965, 0.1, 1.0, 0.0)] == [
        "96.5 %",
        "10 %",
        "100 %",
        "0 %",
    ]
    assert style.sentence("versus", 2.66, "X") == "2.7 times as fast as X"
    assert style.sentence("versus", 1.325, "X") in {"1.32 times as fast as X", "1.33 times as fast as X"}
    assert style.sentence("versus", 1.01, "X") == "as fast as X"
    assert style.sentence("versus", 0.8, "X").replace("\u00a0", " ") == "25 % longer than X took"
    assert style.in_words(4) == "four"
    assert style.in_words(12) == "12"


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_colours_are_legible_in_both_modes(mode):
    def luminance(name):
        parts = (int(COLOURS[name][mode][i : i + 2], 16) / 255 for i in (1, 3, 5))
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(weight * p for weight, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for paper, name in itertools.product(("paper", "raised"), ("ink", "soft", *HUES.values())):
        low, high = sorted((luminance(paper), luminance(name)))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (paper, name)  # WCAG 2 for text
