# SPDX-License-Identifier: Apache-2.0
"""The pages are right: DLCP accepts their commands, programs run, and figures and messages exist."""

import glob
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec

import pytest

from dlcp import cli
from tests.bench.__main__ import parser_of
from tests.docs.pages import ROOT, blocks, commands, pages
from tests.test_project import PROJECT
from tests.train import forked

LANGUAGES = {"sh", "python", "text", "toml", "diff", "yaml", "{toctree}", "{literalinclude}"}
QUICK = ("dlcp fabric check", "dlcp sim list")
"""Commands that are run; of the others the command line is parsed, for they take minutes, root, or another machine."""
OTHERS = {"sudo", "torchrun"}
"""Programs that are not ours, and whose arguments are."""
STAND_INS = {"script.py", "my.module:model"}
"""Names that a reader replaces by a file of their own."""
README_BYTES = 7800
SHOWN_METHODS = "Gloo", "default"
SHOWN_NETWORKS = "clean", "1gbit", "100mbit", "loss1", "bursts1", "20ms", "slow-port"
"""What the table of README.md compares, and where, in its order."""
BUILD_S = 200


def ours(line):
    """Return the words of a command from the first that is DLCP's own concern; none if there is none."""
    words = shlex.split(line, comments=True)
    while words and (words[0] in OTHERS or re.fullmatch(r"[A-Z_]+=\S*", words[0])):
        words = words[1:]
    if words:
        words[0] = re.sub(r"^\.venv(-\w+)?/bin/", "", words[0])
    if ">" in words:
        words = words[: words.index(">")]
    return words[:-1] if words and words[-1] == "&" else words


def check_script(words):
    """Check that what Python or a launcher is to run exists."""
    if words and re.fullmatch(r"(\S*/)?python3?", words[0]):
        words = words[1:]
    if words[:1] == ["-m"]:
        assert words[1] == "venv" or find_spec(words[1]), f"there is no module {words[1]}"
        if words[1] == "tests.bench":
            parser_of(words[2]).parse_args(words[3:])
    elif words:
        assert words[0] in STAND_INS or glob.glob(words[0], root_dir=ROOT), f"there is no {words[0]}"


def check_dlcp(words):
    """Check that ``dlcp`` takes these words."""
    arguments = cli.parse(words)
    for script in (getattr(arguments, "script", ()), getattr(arguments, "command", ())):
        check_script(list(script))


def check_make(words):
    targets = set(re.findall(r"^([a-z][a-z0-9 -]*?):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    known = {word for target in targets for word in target.split()}
    assert {word for word in words if "=" not in word} <= known


def check_pip(words):
    extras = {extra for word in words for extra in re.findall(r"\[([\w,]+)\]", word)}
    known = PROJECT["project"]["optional-dependencies"]
    assert {name for extra in extras for name in extra.split(",")} <= known.keys()


def check_files(words):
    """Check that the files exist that a program which is not ours reads."""
    for path in re.findall(r"[\w./-]+/[\w./-]+\.\w+", " ".join(words)):
        assert (ROOT / path).exists(), f"there is no {path}"


CHECKS = {"dlcp": check_dlcp, "make": check_make, "pip": check_pip, "python": check_script, "python3": check_script}
CHECKS |= dict.fromkeys(("docker", "kubectl", "p4c-bm2-ss", "sbatch", "sh", "tshark"), check_files)
CHECKS |= dict.fromkeys(("apt-get", "export", "install", "mkdir"), lambda words: None)
CHECKS |= {"-m": check_script}


@pytest.mark.parametrize(("line", "place"), [pytest.param(*each, id=f"{each[1]} {each[0]}") for each in commands()])
def test_every_command_is_one(line, place, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = ours(line)
    if not words:
        return
    name, *rest = words
    if name.startswith(".ci/"):
        assert (ROOT / name).exists()
    elif line.startswith("torchrun"):
        check_script(words[words.index("-m") :])
    else:
        CHECKS[name](rest)


def test_quick_commands_run():
    lines = {line for line, _ in commands() if " ".join(ours(line)).startswith(QUICK)}
    assert {prefix for prefix in QUICK for line in lines if prefix in line} == set(QUICK)
    for line in sorted(lines):
        name, *rest = ours(line)
        start = [sys.executable, "-m", "dlcp.cli"] if name == "dlcp" else [sys.executable]
        done = subprocess.run([*start, *rest], cwd=ROOT, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, f"{line}\n{done.stderr}"


PROGRAMS = sorted({block.place.partition(":")[0] for block in blocks("python")})


@pytest.mark.parametrize("page", PROGRAMS)
def test_every_program_of_a_page_runs(page):
    programs = [block for block in blocks("python") if block.place.startswith(f"{page}:")]
    for package in ("torch", "scapy", "msgspec", "pandas"):
        used = "dlcp.sim" if package == "msgspec" else package
        if any(re.search(rf"import {used}|from {used}", program.text) for program in programs):
            pytest.importorskip(package)
    script = "\n".join(f"exec(compile({block.text!r}, {block.place!r}, 'exec'), {{}})" for block in programs)
    done = forked.run(["-c", script], 200)
    assert done.returncode == 0, done.stderr


def test_every_block_says_what_it_is():
    assert [block.place for block in blocks() if block.language not in LANGUAGES] == []


def test_the_site_builds_without_a_warning_and_with_readable_signatures(tmp_path):
    pytest.importorskip("sphinx", reason="the site is built with Sphinx: pip install 'dlcp[docs]'")
    pytest.importorskip("torch")
    pytest.importorskip("msgspec")
    build = ["sphinx", "-q", "-W", "--keep-going", "-b", "text", "-c", "docs", "-d", str(tmp_path), ".", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", *build], cwd=ROOT, capture_output=True, text=True, timeout=BUILD_S)
    assert (done.returncode, done.stderr) == (0, "")
    written = (tmp_path / "docs" / "api.txt").read_text()
    for signature in (
        "workers: int = 8",
        "source: ArrayLike",
        "class dlcp.sim.simulation.StepTimes(\n   *,\n   name: str",
    ):
        assert signature in written
    assert not re.search(r"Annotated|Meta\(|_SupportsArray", written)


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="argparse words help differently in other versions")
def test_generated_parts_of_pages_are_as_the_code_has_them(tmp_path):
    pytest.importorskip("sphinx", reason="the site is built with Sphinx: pip install 'dlcp[docs]'")
    pytest.importorskip("torch")
    pytest.importorskip("msgspec")
    copy = shutil.copytree(ROOT / "docs", tmp_path / "docs")
    command = [sys.executable, str(copy / "reference.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, ""), f"run: python docs/reference.py\n{done.stdout}{done.stderr}"


def test_messages_on_the_page_about_troubleshooting_are_said_somewhere():
    table = (ROOT / "docs" / "troubleshooting.md").read_text().split("## What warnings mean")[1]
    told = [
        part for row in re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE) for part in re.findall(r"`([^`]+)`", row)
    ]
    pieces = [piece.strip() for message in told for piece in re.split(r"\b[A-Z]{4,}\b(?!_)", message) if piece.strip()]
    assert len(pieces) > 15
    sources = "".join(path.read_text() for path in (ROOT / "dlcp").rglob("*.py"))
    # A message may be cut in the source by a placeholder or the end of a line.
    spoken = re.sub(r'"\s+f?"', "", sources)
    assert [piece for piece in pieces if not re.search(re.sub(r"\\ ", r"\\s", re.escape(piece)), spoken)] == []


def test_the_readme_is_short_and_its_figures_are_those_of_the_alternatives():
    readme, alternatives = (ROOT / "README.md").read_text(), (ROOT / "docs" / "alternatives.md").read_text()
    assert len(readme.encode()) <= README_BYTES
    table = alternatives.split("## With default settings")[1].split("\n## ")[0]
    rows = [re.findall(r"[^|\s*]+", line) for line in re.findall(r"^\|.*", table, re.MULTILINE)]
    networks, milliseconds = rows[0], {name: list(map(float, row)) for name, *row in rows[2:] if name in SHOWN_METHODS}
    gains = {
        network: gloo / default
        for network, gloo, default in zip(networks, *(milliseconds[name] for name in SHOWN_METHODS), strict=True)
    }
    shown = [float(value) for value in re.findall(r"\| \*\*([\d.]+)x\*\* \|", readme)]
    assert shown == [float(f"{gains[network]:.2g}") for network in SHOWN_NETWORKS]


def sections(page):
    """Return the text of each section of a page, by its anchor."""
    found = re.findall(r"^#+ (.*)\n((?:(?!## ).*\n)*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-"): text for title, text in found}


def test_a_figure_that_is_a_link_stands_where_it_leads():
    links = [
        (page, *link)
        for page in pages()
        for link in re.findall(r"\[([\d.,]+(?:x| ?%| s| min| GB))\]\(([^)#]+)#([^)]+)\)", page.read_text())
    ]
    assert len(links) > 12
    wrong = [
        f"{page.relative_to(ROOT)}: {figure}"
        for page, figure, target, anchor in links
        if not re.search(
            rf"(?<![\d.]){re.escape(figure.strip('x'))}(?![\d.]*\d)", sections(page.parent / target)[anchor]
        )
    ]
    assert wrong == []


def test_there_is_one_pitch():
    (pitch,) = re.findall(r"^DLCP makes .*\.$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert cli.parser_of(()).description == pitch
    assert PROJECT["project"]["description"] == pitch
    assert pitch in " ".join((ROOT / "docs" / "index.md").read_text().split())


def test_the_picture_in_the_readme_shows_its_table():
    pytest.importorskip("matplotlib")
    pytest.importorskip("torch")
    plots = runpy.run_path(str(ROOT / "tests" / "bench" / "plots.py"))
    drawn = plots["draw_results"]((ROOT / "README.md").read_text())
    assert drawn == (ROOT / "docs" / "results.svg").read_text(), "run: python -m tests.bench.plots"


def test_tables_of_measurements_are_those_that_are_kept():
    pytest.importorskip("matplotlib")
    pytest.importorskip("torch")
    page = (ROOT / "docs" / "measurements.md").read_text()
    assert page.count("<!-- sweep: by tests/bench/plots.py -->") == 1
    plot = runpy.run_path(str(ROOT / "tests" / "bench" / "plots.py"))
    kept = json.loads(plot["KEPT"].read_text())
    assert plot["draw"](kept["cells"]) == (ROOT / "docs" / "sweep.svg").read_text(), "run: python -m tests.bench.plots"
    assert plot["fill"](page, plot["block"](kept)) == page, "run: python -m tests.bench.plots"
    alternatives = (ROOT / "docs" / "alternatives.md").read_text()
    assert plot["fill"](alternatives, plot["alternatives"](alternatives)) == alternatives, (
        "run: python -m tests.bench.plots"
    )


def test_tshark_shows_what_the_page_promises():
    if not shutil.which("tshark"):
        pytest.skip("tshark is not installed")
    (line,) = {line for line, _ in commands() if line.startswith("tshark")}
    done = subprocess.run(shlex.split(line), cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "DLCP" in done.stdout


def test_every_page_is_on_the_site():
    named = set()
    for page in pages():
        for tree in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(), re.DOTALL):
            entries = [line for line in tree.splitlines() if line and not line.startswith(":")]
            named |= {(page.parent / f"{entry}.md").resolve() for entry in entries}
    assert set(pages()) - named == {ROOT / "README.md", ROOT / "docs" / "index.md"}
