# SPDX-License-Identifier: Apache-2.0
"""Numbers as people read them, and sentences that follow the numbers whichever way these turn out."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from dlcp.report.runs import Run
from dlcp.wire import Queue

NO_BREAK: Final = "\u00a0"
SHORT_NAMES: Final = {"gloo": "Gloo", "plain": "plain transport", "dlcp": "DLCP", "dlcp_priority": "DLCP with priority"}
ORDINARY_QUEUE: Final = str(int(Queue.ORDINARY))
AS_FAST_WITHIN: Final = 0.02
"""Ratios this close to 1 are called equal. Chosen by us: less than runs on a shared machine differ by."""


def duration(seconds: float | None) -> str:
    """Return a time with about three digits, in s, or in ms below one second."""
    if seconds is None:
        return "never"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f}{NO_BREAK}ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f}{NO_BREAK}ms"
    digits = 2 if seconds < 9.995 else 1 if seconds < 99.95 else 0
    return f"{seconds:.{digits}f}{NO_BREAK}s"


def in_words(number: int) -> str:
    """Return a small number as a word, a larger one in figures."""
    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    return words[number] if 0 <= number < len(words) else f"{number:,}"


def percent(share: float, digits: int = 1) -> str:
    """Return a share as per cent, without trailing zeros."""
    text = f"{100 * share:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text}{NO_BREAK}%"


def bit_rate(bps: float) -> str:
    """Return a rate in Mbit/s."""
    return f"{bps / 1e6:.3g}{NO_BREAK}Mbit/s" if bps < 1e9 else f"{bps / 1e9:.3g}{NO_BREAK}Gbit/s"


def times(ratio: float) -> str:
    """Return a speed-up with two digits, or three below 2."""
    return f"{ratio:.2f}" if ratio < 1.995 else f"{ratio:.1f}"


def versus(ratio: float, other: str) -> str:
    """Return how one run's time compares with another's, which took ``ratio`` times as long."""
    if abs(ratio - 1) <= AS_FAST_WITHIN:
        return f"as fast as {other}"
    if ratio > 1:
        return f"{times(ratio)} times as fast as {other}"
    return f"{percent(1 / ratio - 1, 0)} longer than {other} took"


def listing(parts: Sequence[str]) -> str:
    """Join parts with commas and a final "and"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def headline(summary: Mapping[str, Any]) -> str:
    """Return the result in one sentence."""
    target = summary["target_accuracy"]
    if target is None:
        return "No accuracy was held by every run, so these runs say nothing about time."
    parts = []
    for name, other in (("gloo", "Gloo"), ("plain", "its plain transport")):
        ratio = summary[f"speedup_over_{name}"]
        if ratio is not None:
            parts.append(f"{versus(ratio, other)} ({duration(summary[name]['seconds_to_target'])})")
    own = duration(summary["dlcp"]["seconds_to_target"])
    return f"DLCP trained to {percent(target)} accuracy in {own}: {listing(parts)}."


def accuracy_sentence(summary: Mapping[str, Any]) -> str:
    """Return a sentence on how the runs' times to the target compare."""
    if summary["target_accuracy"] is None:
        return "No accuracy was held by every run."
    steps = [f"{SHORT_NAMES[name]} {summary[name]['steps_to_target']:.0f}" for name in SHORT_NAMES if summary[name]]
    return (
        f"A mark shows when a run reached {percent(summary['target_accuracy'])} and kept it. In training steps that "
        f"took {listing(steps)}; the rest of the difference is how long a step takes."
    )


def step_sentence(summary: Mapping[str, Any]) -> str:
    """Return a sentence on how long typical and slow steps took."""
    parts = [
        f"{SHORT_NAMES[name]} {duration(figures['step_seconds']['p50'])} and {duration(figures['step_seconds']['p99'])}"
        for name, figures in ((name, summary[name]) for name in SHORT_NAMES)
        if figures
    ]
    return f"The further left and the steeper, the better. Median and 99th percentile: {'; '.join(parts)}."


def waiting_sentence(runs: Mapping[str, Run]) -> str:
    """Return a sentence on what share of a step was spent waiting for the network."""
    shares = {name: waiting_share(run) for name, run in runs.items()}
    parts = [f"{SHORT_NAMES[name]} {percent(share, 0)}" for name, share in shares.items() if share is not None]
    if not parts:
        return "How much of a step was computing is not known for these runs."
    return f"The coloured part of a step is not computing but waiting for the network: {listing(parts)} of the time."


def waiting_share(run: Run) -> float | None:
    """Return the mean share of a step that was not computing, or None if unknown."""
    if not run["compute_seconds"]:
        return None
    compute = sum(run["compute_seconds"]) / len(run["compute_seconds"])
    return max(0.0, 1 - compute / (sum(run["steps"]) / len(run["steps"])))


def background_sentence(runs: Mapping[str, Run]) -> str:
    """Return a sentence on whether the background traffic got its fair share."""
    shares = {name: fair_share_ratio(run) for name, run in runs.items()}
    parts = [f"{percent(share, 0)} beside {SHORT_NAMES[name]}" for name, share in shares.items()]
    sentence = f"Of its fair share (dashed), the background got {listing(parts)}, counted while its bursts were on."
    other = "gloo" if "gloo" in shares else "plain"
    if shares["dlcp"] >= 0.9:
        return f"{sentence} Held to its own share, DLCP did not starve it."
    if shares["dlcp"] >= 0.95 * shares[other]:
        return f"{sentence} Beside DLCP it got no less than beside {SHORT_NAMES[other]}."
    return (
        f"{sentence} DLCP left it less than {SHORT_NAMES[other]} did: part of the difference in time came from there."
    )


def fair_share_ratio(run: Run) -> float:
    """Return the background's mean throughput over its fair share."""
    return float(run["background"]["bps"] / max(1, run["background"]["fair_share_bps"]))


def drops_sentence(runs: Mapping[str, Run]) -> str:
    """Return a sentence on how many gradients the switch dropped beside DLCP, and how many of them by choice."""
    switch, plain = runs["dlcp"]["switch"], runs["plain"]["switch"]
    chosen, ordinary = switch["policy_drops"], ordinary_tail_drops(runs["dlcp"])
    gradients = chosen + switch["tail_drops"] - ordinary
    blind = plain["tail_drops"]
    if not gradients:
        sentence = "While DLCP ran, no gradient was dropped."
    else:
        sentence = (
            f"While DLCP ran, the switch dropped {gradients:,} packets of gradients, "
            f"{percent(chosen / gradients, 0)} of them by choice, as the least valuable."
        )
    return f"{sentence} While the plain transport ran, {blind:,} packets met a full queue, whatever they carried."


def ordinary_tail_drops(run: Run) -> int:
    """Return how many packets met a full queue of ordinary traffic."""
    return int(run["switch"]["by_queue"].get(ORDINARY_QUEUE, {}).get("tail_drops", 0))


def class_sentence(runs: Mapping[str, Run]) -> str:
    """Return a sentence on which drop classes lost how much."""
    ledger = runs["dlcp"]["ledger"]
    rates = [lost / packets if packets else 0.0 for packets, lost, _ in ledger["by_class"]]
    if not ledger["lost"]:
        return "Nothing was lost."
    return (
        f"Of the smallest gradients (class 7) {percent(rates[7])} of the packets were lost, of the largest (class 0) "
        f"{percent(rates[0]) if rates[0] else 'none'}. What is lost is added to the next step: late, not never."
    )


def layer_sentence(runs: Mapping[str, Run]) -> str:
    """Return a sentence on which layers lost how much."""
    ledger, names = runs["dlcp"]["ledger"], runs["dlcp"]["layer_names"]
    rates = {
        names.get(position, f"layer {position}"): lost / packets
        for position, (packets, lost, _) in ledger["by_layer"].items()
        if lost
    }
    if not rates:
        return "Nothing was lost."
    most, least = max(rates, key=rates.__getitem__), min(rates, key=rates.__getitem__)
    sentence = (
        f"From the input (top) to the output (bottom). With DLCP {most} lost most ({percent(rates[most])})"
        f"{f', {least} least ({percent(rates[least])})' if len(rates) > 1 else ''}."
    )
    if len(rates) < len(ledger["by_layer"]):
        sentence += " Layers of few values lost nothing: they are cheap, matter much, and are never dropped."
    return sentence


def bound_sentence(summary: Mapping[str, Any]) -> str:
    """Return a sentence on whether the bound was kept."""
    loss = summary["dlcp"]["loss"]
    broken = loss["violations"] + summary["dlcp_priority"]["loss"]["violations"]
    kept = "none ever broke the bound" if not broken else f"{broken} BROKE the bound, which must not happen"
    return (
        f"No message may lose more than {percent(loss['bound'])} of its packets. With DLCP the worst lost "
        f"{percent(loss['max_message_ratio'])}, and {kept}."
    )


def order_sentence(medians: Mapping[str, Sequence[float]]) -> str:
    """Return a sentence on in which order layers were complete; ``medians`` holds seconds by run, first layer first."""
    first, last = medians["dlcp"][0], medians["dlcp"][-1]
    order = "before" if first < last else "after"
    sentence = (
        f"With DLCP the first layer's gradients are complete after {duration(first)}, {order} the last layer's "
        f"({duration(last)})."
    )
    if order == "before":
        sentence += " That is the order in which the next forward pass needs them."
    if "plain" in medians:
        sentence += f" The plain transport takes {duration(medians['plain'][0])} and {duration(medians['plain'][-1])}."
    return sentence


def second_sentence(summary: Mapping[str, Any]) -> str:
    """Return what else the reader must know to judge the headline: fairness, loss, deferral, replicas."""
    share = summary["background_bps"]["dlcp"] / max(1, summary["background_fair_share_bps"])
    identical = "identical" if summary["replicas_identical"] else "NOT identical, which must not happen"
    worst = summary["dlcp"]["loss"]["max_message_ratio"]
    deferred = summary["dlcp"]["deferral"]["share"]
    put_off = f", {percent(deferred, 0)} of all packets went a step later" if deferred else ""
    return (
        f"Meanwhile the other traffic on the links got {percent(share, 0)} of its fair share. No message lost more "
        f"than {percent(worst)} of its packets{put_off}, and the workers' models ended up {identical}."
    )


_BMV2: Final = (
    "BMv2 (simple_switch_grpc), programmed over P4Runtime, runs the compiled P4 program between Mininet's hosts. It "
    "sends at a link's rate because the interface behind each port has that rate and pushes back; its own rates are "
    "for each queue, and would let a port with several busy queues send several times as much. It has one thread for "
    "sending, so here only one port is ever congested, and its figures are not those of a switch of that speed."
)
_BUILTIN: Final = (
    "The built-in switch, programmed over P4Runtime, runs the compiled P4 program between Mininet's hosts; rates and "
    "queues are its own."
)
_COUNTED: Final = (
    "Hosts count in their kernels and, with DLCP, in the ledgers of their ranks. Switches count in the program; their "
    "counters were read over P4Runtime."
)


class TestbedWords(NamedTuple):
    """Parts of sentences: what joins the workers, what carries packets, where bursts go, how far to trust it."""

    around: str
    over: str
    bursts: str
    trust: str


def testbed_words(run: Run) -> TestbedWords | None:
    """Return the words for the testbed of a run; None if the demo made its own network."""
    fabric = run["fabric"]
    if "switch" not in fabric:
        return None
    bmv2 = fabric["switch"] == "bmv2"
    name = "BMv2" if bmv2 else "the built-in switch"
    count = fabric["switches"]
    around = f"around {name}, in Mininet" if count == 1 else f"over {in_words(count)} switches ({name}), in Mininet"
    targets = {target for _, _, target in run["background"]["bursts"]}
    server_only = len(targets) == 1 and targets == {fabric["workers"]}
    return TestbedWords(
        around,
        f"{name}, whose ports" if count == 1 else f"a leaf-spine of {in_words(count)} switches, whose ports",
        "all into the port of the parameter server" if server_only else "into one port at a time",
        _BMV2 if bmv2 else _BUILTIN,
    )


def agreement_sentence(runs: Mapping[str, Run]) -> str:
    """Return a sentence on whether what hosts and switches counted agrees; empty if nobody compared."""
    compared = {name: run["agreement"] for name, run in runs.items() if "agreement" in run}
    if not compared:
        return ""
    wrong = [SHORT_NAMES[name] for name, findings in compared.items() if any(f["agree"] is False for f in findings)]
    if wrong:
        return f"{_COUNTED} They DISAGREE in the runs with {listing(wrong)}, which must not happen."
    if any(finding["agree"] is None for findings in compared.values() for finding in findings):
        return f"{_COUNTED} Wherever both sides count, they agree to the packet."
    return f"{_COUNTED} They agree to the packet."
