# SPDX-License-Identifier: Apache-2.0
"""The launcher's summary after training: the ledgers of all ranks of this machine, added up."""

from collections import Counter
from collections.abc import Sequence
from textwrap import shorten
from typing import Any, Final

from dlcp.train.launcher import Report, failures
from dlcp.transport.ledger import add_up, coded

OF_OTHERS: Final = ("token", "job", "sender")
"""Causes of refusal for packets of another job, or of an earlier start of this one."""
NOTABLE_REFUSED: Final = 0.01
"""Refused packets below this share of those delivered are greetings and late packets of an earlier start."""

ROWS_MAX: Final = 8
"""Most ranks in the table of activities."""
SHOWN_S: Final = 5e-5
"""Shortest activity per step that has a column."""
ERROR_CHARACTERS: Final = 160
"""Most of an error of a rank that was not the first to fail."""
NOTE: Final = "the figures are up to a second older"
TO_FLUSH: Final = "a script that calls flush() before its last step leaves nothing"


def summarize(reports: Sequence[Report]) -> dict[str, Any]:
    """Return the totals of the ranks of this machine; counts are in packets.

    ``models`` has one entry per trained model, in the order in which the script first trained them. ``errors`` are in
    the order in which ranks failed.
    """
    ranks = reports[0]["ranks"] if reports else 0
    failed = failures(reports)
    has_first = failed and not failed[0]["stopped_by"]  # a signal to the launcher ends all ranks at once
    # A script may train one model on some ranks and another one on the others, such as the stages of a pipeline.
    groups: dict[tuple[int, tuple[int, ...]], list[dict[str, Any]]] = {}
    for report in reports:
        for number, model in enumerate(report["models"]):
            groups.setdefault((number, tuple(model["group_ranks"] or range(ranks))), []).append(model)
    models = [_merge(groups[key], key[1]) for key in sorted(groups)]
    return {
        "ranks": ranks,
        "ranks_here": [report["rank"] for report in reports],
        "local_ranks": reports[0]["local_ranks"] if reports else None,
        "ranks_without_report": [report["rank"] for report in reports if not report["final"]],
        "stopped_by": reports[0]["stopped_by"] if reports else None,
        "restarts": max((report["restarts"] for report in reports), default=0),
        "errors": {str(report["rank"]): report["error"] for report in failed},
        "first_failure": {name: failed[0][name] for name in ("rank", "error", "log")} if has_first else None,
        "backend": reports[0]["backend"] if reports else None,
        "models": models,
        "bound_exceeded": sum(model["bound_exceeded"] for model in models),
    }


def as_lines(found: dict[str, Any]) -> list[str]:
    """Return the summary as lines of text."""
    here, missing = found["ranks_here"], found["ranks_without_report"]
    if not here:
        return ["", "DLCP  knows nothing about the training: no rank of this machine has left a report"]
    lines = [""]
    for model in found["models"]:
        lines += _about(model, found)
    if not found["models"]:
        about = f"all collectives went over the backend {found['backend']}" if found["backend"] else "had nothing to do"
        until = " before it ended" if missing or found["errors"] else ""
        lines.append(f"DLCP  {about}; the script trained no DistributedDataParallel model{until}")
    if found["restarts"]:
        times = "once" if found["restarts"] == 1 else f"{found['restarts']} times"
        lines.append(f"  restarted          {times}; this summary covers the last start")
    if missing:
        lines.append(f"  without a report   {_ranks(missing)}: ended before writing one, so {NOTE}")
    if len(here) < found["local_ranks"]:
        absent = f"{found['local_ranks'] - len(here)} of this machine's {found['local_ranks']} ranks"
        lines.append(f"  missing            the reports of {absent}")
    return lines + _failed(found)


def _failed(found: dict[str, Any]) -> list[str]:
    """Return which rank failed first and where its log is, then the other ranks that failed."""
    first = found["first_failure"]
    if first is None:
        by_error: dict[str, list[int]] = {}
        for rank, error in found["errors"].items():
            by_error.setdefault(shorten(error, ERROR_CHARACTERS), []).append(int(rank))
        stopped = [f"  dlcp train got {found['stopped_by']}, and so did its ranks"] if found["stopped_by"] else []
        return stopped + [f"  {_ranks(sorted(ranks))} ended with {error}" for error, ranks in by_error.items()]
    log = f"; its whole log: {first['log']}" if first["log"] else ""
    others = {rank: error for rank, error in found["errors"].items() if rank != str(first["rank"])}
    return [
        f"  rank {first['rank']} failed first, with {first['error']}{log}",
        *(f"  rank {rank} then ended, with {shorten(error, ERROR_CHARACTERS)}" for rank, error in others.items()),
    ]


def _ranks(ranks: Sequence[object]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def _about(model: dict[str, Any], found: dict[str, Any]) -> list[str]:
    watched = model["watched"]
    slow = f"  who is slow        {watched['verdict']['text']}" if watched else ""
    if not model["on"]:
        if watched:
            return [f"DLCP watched {model['model']}: {model['note']}", slow, *_activities(watched)]
        return [f"DLCP left {model['model']} alone: {model['note']}"]
    members, ranks = model["group_ranks"], len(model["group_ranks"])
    here = len(set(members) & set(found["ranks_here"]))
    who = f"{ranks} ranks" if ranks == found["ranks"] else f"ranks {', '.join(map(str, members))}"
    if here < ranks:
        complete = len(found["ranks_here"]) >= found["local_ranks"]
        who = f"{here} of {who}, those {'of this machine' if complete else 'with a report'}"
    head = f"DLCP  {model['model']}, {model['steps']:,} steps, {who if ranks > 1 else '1 rank: nothing to exchange'}"
    if ranks == 1:
        return [f"{head} (torchrun's --nproc-per-node says how many)"]
    exceeded = f"{model['bound_exceeded']} TIMES" if model["bound_exceeded"] else "never"
    strange = sum(model["refused"].get(cause, 0) for cause in OF_OTHERS)
    encoded = coded(model["by_bits"])
    lower = sum(lost for _, lost in encoded.values())
    packets = sum(count for count, _ in model["by_bits"].values())
    rest = "; the rest in full" if len(encoded) < len(model["by_bits"]) else ""
    precision = ", ".join(f"{bits} bits: {count / packets:.1%}" for bits, (count, _) in encoded.items())
    lost = "0" if not model["lost"] else f"{model['lost']:,} ({model['lost'] / model['sent']:.3%})"
    return [
        head,
        f"  packets sent       {model['sent']:,}, through {model['through']}",
        f"  delivered          {model['delivered']:,}",
        f"  lost for this step {lost}; at most {model['worst']:.1%} of one message, {model['loss_bound']:.1%} allowed",
        *([f"    of these         {lower:,} held lower digits only: their values arrived rounded"] if lower else []),
        *([f"  precision          {precision} of the packets{rest}"] if encoded else []),
        f"  retransmitted      {model['retransmitted']:,}",
        f"  bound exceeded     {exceeded}",
        *(
            [f"  left over          {model['left_over']:.1%} of the last step; {TO_FLUSH}"]
            if model["left_over"]
            else []
        ),
        *(
            [f"  refused            {strange:,} packets of other jobs: give each job ports of its own (DLCP_BIND)"]
            if strange > NOTABLE_REFUSED * model["delivered"]
            else []
        ),
        *([f"  route              {model['route']}"] if model["route"] else []),
        f"  fallback           {model['fallback'] or _without_fallback(model)}",
        *([slow] if watched and watched["verdict"]["step_s"] else []),
    ]


def _activities(watched: dict[str, Any]) -> list[str]:
    """Return a table of what ranks do in a step, those first that wait least."""
    rows = sorted(watched["activities_s"].items(), key=lambda row: row[1]["waiting"])
    if not watched["verdict"]["steps"]:
        return []
    names = [name for name in rows[0][1] if any(row[name] >= SHOWN_S for _, row in rows)]
    lines = [f"  {'ms per step':<14}{''.join(f'{name:>12}' for name in names)}"]
    lines += [
        f"  {f'rank {rank}':<14}{''.join(f'{1e3 * row[name]:12.1f}' for name in names)}"
        for rank, row in rows[:ROWS_MAX]
    ]
    return [*lines, *([f"  and {len(rows) - ROWS_MAX} ranks that wait longer"] if len(rows) > ROWS_MAX else [])]


def _without_fallback(model: dict[str, Any]) -> str:
    steps, over_dlcp = model["steps"], model["steps"] - model["framework_steps"]
    return f"none, {'all' if over_dlcp == steps else f'{over_dlcp:,} of {steps:,}'} steps went over DLCP"


def _way(parts: Sequence[dict[str, Any]], ranks: int) -> str:
    """Describe the way that packets took, from each rank's number of local peers."""
    local_peers = {part["local_peers"] for part in parts}
    if local_peers == {0}:
        return "sockets"
    return "memory" if local_peers == {ranks - 1} else "memory within a host and sockets elsewhere"


def _share(last_steps: Sequence[dict[str, int]]) -> float:
    packets = sum(each["packets"] for each in last_steps)
    return sum(each["left_over"] for each in last_steps) / packets if packets else 0.0


def _merge(parts: Sequence[dict[str, Any]], ranks: Sequence[int]) -> dict[str, Any]:
    """Add up the ranks' reports on one model; ``ranks`` are all that train it."""
    ledger = add_up([part["ledger"] for part in parts if part["ledger"]])
    return {
        **{name: parts[0][name] for name in ("model", "parameters", "note", "on", "loss_bound", "route")},
        **{name: min(part[name] for part in parts) for name in ("steps", "framework_steps")},
        **{name: ledger[name] for name in ("sent", "delivered", "lost", "retransmitted")},
        "by_bits": ledger["by_bits"],
        "worst": ledger["max_message_ratio"],
        "left_over": _share([part["last_step"] for part in parts if part["last_step"]]),
        "bound_exceeded": ledger["violations"],
        "refused": dict(sum((Counter(part["refused"]) for part in parts), Counter())),
        "through": _way(parts, len(ranks)),
        "group_ranks": list(ranks),
        "fallback": next((part["fallback"] for part in parts if part["fallback"]), None),
        "watched": next((part["watched"] for part in parts if part["watched"]), None),
    }
