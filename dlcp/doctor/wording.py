# SPDX-License-Identifier: Apache-2.0
"""What the path to a peer is like, in findings."""

from dlcp.doctor.finding import Finding, Section, Status
from dlcp.doctor.path import ECN_NAMES, PathReport

BAD_LOSS: float = 0.2
"""A share of lost packets at which something is broken rather than busy; chosen here."""


def describe(report: PathReport) -> Section:
    """Say what was found on the path to a peer."""
    host, port = report.peer
    findings = [_round_trip(report), _loss(report), _largest(report), _dscp(report), _ecn(report)]
    return Section(f"Path to {host}:{port}", findings)


def _round_trip(report: PathReport) -> Finding:
    if not report.rtts_s:
        return Finding("round trip", Status.MISSING, "not one answer of those counted", "see the loss below")
    low, middle, high = (1e3 * value for value in (min(report.rtts_s), report.rtt_median_s, max(report.rtts_s)))
    data = {"rtt_ms": {"least": low, "median": middle, "most": high}}
    return Finding("round trip", Status.OK, f"{middle:.2f} ms, from {low:.2f} to {high:.2f}", data=data)


def _loss(report: PathReport) -> Finding:
    there, back = report.sent - report.arrived_there, report.arrived_there - report.arrived_back
    data = {
        "packets": report.sent,
        "lost_there": there,
        "lost_back": back,
        "loss_there": report.loss_there,
        "loss_back": report.loss_back,
    }
    if not there and not back:
        return Finding("loss", Status.OK, f"none of {report.sent} packets", data=data)
    text = f"{there} of {report.sent} packets there, {back} of {report.arrived_there} answers back"
    if max(report.loss_there, report.loss_back) >= BAD_LOSS:
        fix = "look for a broken cable, a duplex mismatch, or a rate limit on UDP on the way"
        return Finding("loss", Status.MISSING, text, fix, data)
    return Finding("loss", Status.NOTE, f"{text}; DLCP bears that, TCP slows down", data=data)


def _largest(report: PathReport) -> Finding:
    mtu, there = report.mtu_bytes, report.mtu_there_bytes
    data = {"mtu_bytes": mtu, "mtu_there_bytes": there, "interface_mtu_bytes": report.interface_mtu_bytes}
    subject = "largest packet"
    if not mtu:
        fix = "look for a firewall that lets small packets through only"
        return Finding(subject, Status.MISSING, "not even 576 bytes pass both ways", fix, data)
    text = f"{mtu} bytes both ways, don't-fragment set"
    if mtu == report.interface_mtu_bytes:
        return Finding(subject, Status.OK, text, data=data)
    only = "" if there == mtu else f"; {there} to the peer, so the way back is the narrower"
    return Finding(
        subject,
        Status.NOTE,
        f"{text}{only}; the interface would take {report.interface_mtu_bytes}",
        "nothing, if a tunnel explains it; else look for a hop with a smaller MTU",
        data,
    )


def _dscp(report: PathReport) -> Finding:
    there, back = _changed(report.dscp_there), _changed(report.dscp_back)
    data = {"dscp_there": _as_json(report.dscp_there), "dscp_back": _as_json(report.dscp_back)}
    subject = "DSCP"
    if not report.dscp_there:
        fix = "look for a firewall that refuses unknown DSCP values, or set DLCP_TAGGED=0"
        return Finding(subject, Status.MISSING, "packets with DLCP's tags do not arrive", fix, data)
    if not there and not back:
        return Finding(subject, Status.OK, "tags survive both ways", data=data)
    ways = " and ".join(way for way, lost in (("there", there), ("back", back)) if lost)
    text = f"tags are changed on the way {ways} ({_example(there or back)})"
    fix = "trust DSCP at the switch ports of the ranks, where switches without P4 are to help; DLCP works without"
    return Finding(subject, Status.NOTE, text, fix, data)


def _ecn(report: PathReport) -> Finding:
    there, back = _changed(report.ecn_there), _changed(report.ecn_back)
    data = {"ecn_there": _as_json(report.ecn_there), "ecn_back": _as_json(report.ecn_back)}
    subject = "ECN"
    absent = [name for code, name in ECN_NAMES.items() if code not in report.ecn_there]
    if absent:
        text = f"packets marked {', '.join(absent)} do not arrive"
        return Finding(subject, Status.NOTE, text, "look for a firewall that refuses ECN", data)
    if not there and not back:
        return Finding(subject, Status.OK, "marks survive both ways", data=data)
    congested = all(after == 3 for changes in (there, back) for after in changes.values())
    if congested:
        return Finding(subject, Status.OK, "works: the path marked these packets as congested", data=data)
    ways = " and ".join(way for way, lost in (("there", there), ("back", back)) if lost)
    fix = "let the routers keep ECN bits; until then DLCP slows down by loss and delay alone"
    return Finding(subject, Status.NOTE, f"marks are bleached on the way {ways}", fix, data)


def _changed(seen: dict[int, int]) -> dict[int, int]:
    return {sent: arrived for sent, arrived in seen.items() if sent != arrived}


def _example(changed: dict[int, int]) -> str:
    sent, arrived = next(iter(changed.items()))
    return f"{sent} arrives as {arrived}" + (f", and {len(changed) - 1} others" if len(changed) > 1 else "")


def _as_json(seen: dict[int, int]) -> dict[str, int]:
    return {str(sent): arrived for sent, arrived in seen.items()}
