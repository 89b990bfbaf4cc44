# SPDX-License-Identifier: Apache-2.0
"""How the page speaks of where its runs took place, when that was a testbed, and of what hosts and switches counted."""

from collections.abc import Mapping
from typing import NamedTuple

from dlcp.demo.summary import Run
from dlcp.report.wording import SHORT_NAMES, in_words, listing

_BMV2 = (
    "BMv2 (simple_switch_grpc), programmed over P4Runtime, runs the compiled P4 program between Mininet's hosts. It "
    "sends at a link's rate because the interface behind each port has that rate and pushes back; its own rates are "
    "for each queue, and would let a port with several busy queues send several times as much. It has one thread for "
    "sending, so here only one port is ever congested, and its figures are not those of a switch of that speed."
)
_BUILTIN = (
    "The built-in switch, programmed over P4Runtime, runs the compiled P4 program between Mininet's hosts; rates and "
    "queues are its own."
)
_COUNTED = (
    "Hosts count in their kernels and, with DLCP, in the ledgers of their ranks; switches count in the program, and "
    "were read over P4Runtime."
)


class Testbed(NamedTuple):
    """Parts of sentences: what is between the workers, what carries, where bursts go, and what to think of it."""

    around: str
    over: str
    bursts: str
    trust: str


def testbed(run: Run) -> Testbed | None:
    """Return how to speak of the testbed of a run, None if it ran in the demo's own place."""
    fabric = run["fabric"]
    if "switch" not in fabric:
        return None
    bmv2 = fabric["switch"] == "bmv2"
    name = "BMv2" if bmv2 else "the built-in switch"
    count = fabric["switches"]
    around = f"around {name}, in Mininet" if count == 1 else f"over {in_words(count)} switches ({name}), in Mininet"
    targets = {target for _, _, target in run["background"]["bursts"]}
    server_only = len(targets) == 1 and targets == {fabric["workers"]}
    return Testbed(
        around,
        f"{name}, whose ports" if count == 1 else f"a leaf-spine of {in_words(count)} switches, whose ports",
        "all into the port of the parameter server" if server_only else "into one port at a time",
        _BMV2 if bmv2 else _BUILTIN,
    )


def agreement_sentence(runs: Mapping[str, Run]) -> str:
    """Say whether what hosts and switches counted agrees; empty if nobody compared."""
    compared = {name: run["agreement"] for name, run in runs.items() if "agreement" in run}
    if not compared:
        return ""
    wrong = [SHORT_NAMES[name] for name, findings in compared.items() if any(f["agree"] is False for f in findings)]
    if wrong:
        return f"{_COUNTED} They DISAGREE in the runs with {listing(wrong)}, which must not happen."
    if any(finding["agree"] is None for findings in compared.values() for finding in findings):
        return f"{_COUNTED} Wherever both sides count, they agree to the packet."
    return f"{_COUNTED} They agree to the packet."
