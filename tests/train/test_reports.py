# SPDX-License-Identifier: Apache-2.0
"""The final report: totals over ranks, and the meaning of a measurement."""

import pytest

from dlcp.train import headroom, summary
from dlcp.train.launcher import WorkerTask, _note_ends, read_reports, write_report

ProcessFailure = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors").ProcessFailure


def ledger(sent=1000, lost=0, violations=0, worst=0.0, by_bits=None):
    return {
        "sent": sent,
        "delivered": sent - lost,
        "lost": lost,
        "retransmitted": 5,
        "extra": 0,
        "max_message_ratio": worst,
        "violations": violations,
        "by_bits": by_bits or {"32": [sent, lost]},
        "by_class": [[0, 0, 0]] * 8,
        "by_layer": {},
    }


def report(
    rank,
    *,
    ranks=2,
    restart=0,
    error=None,
    final=True,
    local_ranks=1,
    models=None,
    measured=None,
    backend=None,
    left_over=0,
    **counts,
):
    model = {
        "model": "Net",
        "parameters": 100,
        "note": "switched on by dlcp train",
        "on": True,
        "steps": 10 + rank,
        "loss_bound": 0.1,
        "fallback": None,
        "route": "",
        "framework_steps": 0,
        "local_peers": 0,
        "group_ranks": list(range(ranks)),
        "refused": {},
        "ledger": ledger(**counts),
        "last_step": {"packets": 100, "left_over": left_over},
        "watched": None,
    }
    return {
        "rank": rank,
        "ranks": ranks,
        "local_rank": rank % 2,
        "local_ranks": local_ranks,
        "restarts": restart,
        "final": final,
        "stopped_by": None,
        "error": error,
        "failed_at_s": 1.0 - rank / 8 if error else None,
        "traceback": "",
        "log": "",
        "backend": backend,
        "models": [model] if models is None else models,
        "measured": measured,
    }


def test_the_summary_adds_up_what_the_ranks_counted():
    reports = [report(0, sent=1000, lost=20, worst=0.04), report(1, sent=500, lost=1, worst=0.08)]
    found = summary.summarize(reports)
    (model,) = found["models"]
    assert (model["sent"], model["delivered"], model["lost"], model["retransmitted"]) == (1500, 1479, 21, 10)
    assert (model["worst"], model["steps"], model["bound_exceeded"]) == (0.08, 10, 0)
    text = "\n".join(summary.as_lines(found))
    assert "DLCP  Net, 10 steps, 2 ranks" in text
    assert "packets sent       1,500, through sockets" in text
    assert "21 (1.400%); at most 8.0% of one message, 10.0% allowed" in text
    assert "left over" not in text
    assert "bound exceeded     never" in text
    assert "fallback           none" in text


def test_precision_and_what_loss_then_means_is_told():
    reports = [
        report(0, sent=1000, lost=20, by_bits={"8": [600, 15], "32": [400, 5]}),
        report(1, sent=1000, lost=10, by_bits={"4": [200, 0], "8": [620, 10], "32": [180, 0]}),
    ]
    text = "\n".join(summary.as_lines(summary.summarize(reports)))
    assert "lost for this step 30 (1.500%)" in text
    assert "of these         25 held lower digits only: their values arrived rounded" in text
    assert "precision          4 bits: 10.0%, 8 bits: 61.0% of the packets; the rest in full" in text
    text = "\n".join(summary.as_lines(summary.summarize([report(0, lost=20)])))
    assert "precision" not in text
    assert "of these" not in text


def test_what_no_step_will_send_is_told():
    found = summary.summarize([report(0, left_over=7), report(1, left_over=3)])
    assert found["models"][0]["left_over"] == 0.05
    text = "\n".join(summary.as_lines(found))
    assert (
        "left over          5.0% of the last step; a script that calls flush() before its last step leaves nothing"
        in text
    )


def test_a_bound_that_was_exceeded_and_a_fallback_cannot_be_overlooked():
    reports = [report(0, violations=2), report(1)]
    reports[1]["models"][0]["fallback"] = "rank 0 is silent"
    found = summary.summarize(reports)
    text = "\n".join(summary.as_lines(found))
    assert found["bound_exceeded"] == 2
    assert "bound exceeded     2 TIMES" in text
    assert "fallback           rank 0 is silent" in text


def test_the_route_that_the_ranks_chose_is_told():
    reports = [report(0), report(1)]
    for each in reports:
        each["models"][0] |= {"route": "framework since step 4: gloo 101 ms a step, DLCP 118 ms", "framework_steps": 6}
    text = "\n".join(summary.as_lines(summary.summarize(reports)))
    assert "route              framework since step 4: gloo 101 ms a step, DLCP 118 ms\n" in text
    assert "fallback           none, 4 of 10 steps went over DLCP" in text


@pytest.mark.parametrize(
    ("local_peers", "way"),
    [((2, 2, 2), "memory"), ((1, 1, 0), "memory within a host and sockets elsewhere"), ((0, 0, 0), "sockets")],
)
def test_the_way_that_packets_took_is_told(local_peers, way):
    reports = [report(rank, ranks=3) for rank in range(3)]
    for each, count in zip(reports, local_peers, strict=True):
        each["models"][0]["local_peers"] = count
    found = summary.summarize(reports)
    assert found["models"][0]["through"] == way
    assert f"packets sent       3,000, through {way}\n" in "\n".join(summary.as_lines(found))


def test_models_of_some_ranks_are_told_apart():
    reports = [report(rank, ranks=4, sent=100 * (rank + 1)) for rank in range(3)]
    for each in reports[:2]:
        each["models"][0]["group_ranks"] = [0, 1]
    reports[2]["models"][0]["group_ranks"] = [2, 3]
    text = "\n".join(summary.as_lines(summary.summarize([*reports, report(3, ranks=4, models=[])])))
    assert "Net, 10 steps, ranks 0, 1\n  packets sent       300" in text
    assert "Net, 12 steps, ranks 2, 3\n  packets sent       300" in text


def test_ranks_of_other_machines_are_not_claimed():
    text = "\n".join(summary.as_lines(summary.summarize([report(rank, ranks=8) for rank in (4, 5)])))
    assert "2 of 8 ranks, those of this machine" in text


def test_restarts_are_told_and_refused_packets_if_they_are_more_than_late_ones():
    reports = [report(rank, restart=2) for rank in range(2)]
    reports[0]["models"][0]["refused"] = {"token": 3, "stale": 9}
    reports[1]["models"][0]["refused"] = {"token": 1, "job": 1}
    found = summary.summarize(reports)
    assert (found["restarts"], found["models"][0]["refused"]) == (2, {"token": 4, "stale": 9, "job": 1})
    text = "\n".join(summary.as_lines(found))
    assert "refused" not in text
    reports[1]["models"][0]["refused"]["job"] = 30
    told = "\n".join(summary.as_lines(summary.summarize(reports)))
    assert "refused            34 packets of other jobs: give each job ports of its own" in told
    assert "restarted          2 times; this summary covers the last start" in text
    quiet = "\n".join(summary.as_lines(summary.summarize([report(0), report(1)])))
    assert "refused" not in quiet
    assert "restarted" not in quiet
    assert "restarted          once;" in "\n".join(summary.as_lines(summary.summarize([report(0, restart=1)])))


def test_one_rank_has_nothing_to_exchange():
    text = "\n".join(summary.as_lines(summary.summarize([report(0, ranks=1)])))
    assert "1 rank: nothing to exchange" in text
    assert "--nproc-per-node" in text


def test_nothing_to_do_and_errors_are_said():
    text = "\n".join(summary.as_lines(summary.summarize([report(0, models=[], error="KeyError: 'x'")])))
    assert "trained no DistributedDataParallel model" in text
    assert "rank 0 failed first, with KeyError: 'x'" in text
    assert "no rank of this machine has left a report" in summary.as_lines(summary.summarize([]))[-1]
    text = "\n".join(summary.as_lines(summary.summarize([report(0, models=[], backend="dlcp")])))
    assert "all collectives went over the backend dlcp; the script trained no Distributed" in text


def test_the_rank_that_failed_first_comes_first_then_those_that_fail_because_of_it():
    gloo = "RuntimeError: Connection closed by peer\n" + 40 * "which is long, "
    reports = [report(rank, ranks=4, models=[], error=gloo) for rank in range(4)]
    reports[2] |= {"error": "ValueError: a label that is none", "failed_at_s": 0.0, "log": "/logs/2.log"}
    reports[3] |= {"error": "killed", "failed_at_s": None}
    found = summary.summarize(reports)
    assert found["first_failure"] == {"rank": 2, "error": "ValueError: a label that is none", "log": "/logs/2.log"}
    assert list(found["errors"]) == ["2", "1", "0", "3"]
    first, *others = summary.as_lines(found)[-4:]
    assert first == "  rank 2 failed first, with ValueError: a label that is none; its whole log: /logs/2.log"
    assert [line.split()[:4] for line in others] == [["rank", rank, "then", "ended,"] for rank in "103"]
    assert all(len(line) < 200 for line in others)


def noted_ends(reports, codes, stopped_by=None):
    """Return the summary's lines about ranks that ended with these exit codes, by rank."""
    failures = {rank: ProcessFailure(rank, 1, code, "") for rank, code in codes.items()}
    _note_ends(reports, failures, stopped_by)
    text = "\n".join(summary.as_lines(summary.summarize(reports)))
    return text[text.index("bound exceeded") :].splitlines()[2:]


NOTES = "  without a report   {}: ended before writing one, so the figures are up to a second older"


@pytest.mark.parametrize(
    ("final", "errors", "codes", "stopped_by", "said"),
    [
        (
            "",
            {},
            {},
            "SIGTERM",
            [
                NOTES.format("ranks 0, 1"),
                "  dlcp train got SIGTERM, and so did its ranks",
                "  ranks 0, 1 ended with the SIGTERM of dlcp train",
            ],
        ),
        (
            "01",
            {0: "KeyboardInterrupt", 1: "KeyboardInterrupt"},
            {},
            "SIGINT",
            ["  dlcp train got SIGINT, and so did its ranks", "  ranks 0, 1 ended with KeyboardInterrupt"],
        ),
        (
            "0",
            {0: "RuntimeError: Connection closed by peer"},
            {1: -9, 0: 1},
            None,
            [
                NOTES.format("rank 1"),
                "  rank 1 failed first, with SIGKILL, as when memory runs out",
                "  rank 0 then ended, with RuntimeError: Connection closed by peer",
            ],
        ),
        (
            "",
            {},
            {1: -15, 0: -15},
            None,
            [
                NOTES.format("ranks 0, 1"),
                "  rank 1 failed first, with SIGTERM",
                "  rank 0 then ended, with torchrun's SIGTERM",
            ],
        ),
        ("0", {}, {1: 7}, None, [NOTES.format("rank 1"), "  rank 1 failed first, with exit status 7"]),
        ("01", {}, {1: -11}, None, ["  rank 1 failed first, with SIGSEGV"]),
        ("", {}, {}, None, [NOTES.format("ranks 0, 1")]),
    ],
)
def test_what_is_said_of_a_rank_without_a_report_is_what_torchrun_knows(final, errors, codes, stopped_by, said):
    reports = [report(rank, final=str(rank) in final, error=errors.get(rank)) for rank in range(2)]
    assert noted_ends(reports, codes, stopped_by) == said


def test_missing_reports_and_untrained_models_are_said_as_such():
    text = "\n".join(summary.as_lines(summary.summarize([report(0, ranks=4, local_ranks=4)])))
    assert "1 of 4 ranks, those with a report" in text
    assert "missing            the reports of 3 of this machine's 4 ranks" in text
    text = "\n".join(summary.as_lines(summary.summarize([report(0, final=False, models=[])])))
    assert "the script trained no DistributedDataParallel model before it ended" in text


def test_a_measurement_that_failed_says_why():
    failed = report(1, models=[], error="SIGKILL")
    assert headroom.nothing_measured([report(0), failed]) == "rank 1 ended with SIGKILL: too little was measured"
    sharded = report(0)
    sharded["models"][0] |= {"on": False, "note": "FSDP2 models cannot be measured"}
    assert headroom.nothing_measured([sharded]) == "FSDP2 models cannot be measured: nothing was measured"


def test_reports_of_the_last_start_count(tmp_path):
    """After a restart the ranks of this machine may have other numbers, and those of other machines may be gone."""
    for rank, restart in ((2, 0), (3, 0), (1, 1), (0, 1)):
        write_report(tmp_path, report(rank, restart=restart))
    (tmp_path / "1.part99").write_text("{")
    assert [(each["rank"], each["restarts"]) for each in read_reports(tmp_path)] == [(0, 1), (1, 1)]
    assert read_reports(tmp_path / "nowhere") == []


def test_a_plan_travels_in_the_environment(tmp_path):
    for task in (WorkerTask(), WorkerTask(backend=True), WorkerTask(measure_steps=60, reports=str(tmp_path))):
        assert WorkerTask.from_environment(task.as_environment()) == task
    assert WorkerTask.from_environment({}) == WorkerTask()


def measured(none, framework, whole=(), coarse=(), *, factor=1.0, why_not=None):
    seconds = {"none": none, "framework": framework, "32 bits": whole, "8 bits": coarse}
    return {
        "model": "Net",
        "gradient_bytes": 4_000_000,
        "backend": "gloo",
        "seconds": {name: list(times) for name, times in seconds.items()},
        "steps_factors": {} if why_not else {"32 bits": 1.0, "framework": 1.0, "8 bits": factor},
        "why_not": why_not,
    }


def test_a_step_takes_as_long_as_its_slowest_rank():
    one = measured([0.05, 0.05, 0.05, 0.9], [0.10, 0.10, 0.12, 0.10], [0.08, 0.08, 0.08, 0.08])
    other = measured([0.06, 0.04, 0.06, 0.1], [0.08, 0.09, 0.09, 0.10], [0.07, 0.07, 0.07, 0.07])
    found = headroom.evaluate([report(0, measured=one), report(1, measured=other)])
    assert found["ways"]["none"]["step_s"] == pytest.approx(0.06)
    assert found["ways"]["framework"]["step_s"] == pytest.approx(0.10)
    assert found["communication_share"] == pytest.approx(0.4)
    assert found["speedup_at_most"] == pytest.approx(0.10 / 0.06)
    assert found["speedup"] == pytest.approx(1.25)


def lines(*seconds, **more):
    return "\n".join(headroom.as_lines(headroom.evaluate([report(0, measured=measured(*seconds, **more))])))


def test_what_can_be_won_is_said():
    text = lines([0.060] * 4, [0.100] * 4, [0.080] * 4)
    assert "no communication        60.0" in text
    assert "40% of a step is communication" in text
    assert "DLCP, 32 bits           80.0" in text
    assert "1.25x: saves 20.0 ms, 50% of what can be saved" in text
    assert "DLCP uses 32 bits here" in text
    assert "DLCP can gain at most 1.67x here" in text
    assert "was not trained properly" in text


def test_what_dlcp_would_choose_is_said():
    assert "DLCP uses 8 bits here" in lines([0.060] * 4, [0.100] * 4, [0.080] * 4, [0.070] * 4)
    assert "DLCP uses 32 bits here" in lines([0.060] * 4, [0.100] * 4, [0.080] * 4, [0.079] * 4)
    assert "DLCP uses 32 bits here" in lines([0.060] * 4, [0.100] * 4, [0.080] * 4, [0.070] * 4, factor=1.2)
    assert "DLCP leaves averaging to gloo here" in lines([0.060] * 4, [0.070] * 4, [0.080] * 4, [0.075] * 4)


def test_a_loss_is_said_as_plainly_as_a_win():
    assert "0.50x: slower by 100.0 ms" in lines([0.060] * 4, [0.100] * 4, [0.200] * 4)


def test_no_head_room_is_no_promise():
    text = lines([0.099] * 4, [0.100] * 4, why_not="parameter x is complex64")
    assert "DLCP cannot gain much" in text
    assert "at most" not in text
    assert "DLCP was not measured: parameter x is complex64" in text


def test_steps_that_vary_more_than_communication_takes_prove_nothing():
    text = lines([0.06, 0.10, 0.14, 0.10], [0.08, 0.12, 0.16, 0.12])
    assert "Steps vary by more than communication takes" in text
    assert "at most" not in text


def test_without_enough_steps_nothing_is_claimed():
    short = report(0, measured=measured([0.1], [0.1]))
    assert headroom.evaluate([short]) is None
    assert "ended before enough steps" in headroom.nothing_measured([short])
    assert headroom.evaluate([report(0)]) is None
    assert "no DistributedDataParallel model" in headroom.nothing_measured([report(0)])
    assert "no rank has left a report" in headroom.nothing_measured([])


def watched_report(rank, ranks=10, **verdict):
    told = {"text": "rank 9 makes the others wait", "steps": 20, **verdict}
    waits = {str(each): {"loading": 0.001, "evaluation": 0.0, "waiting": 0.01 * (10 - each)} for each in range(ranks)}
    found = report(rank, ranks=ranks)
    (model,) = found["models"]
    model |= {"on": False, "note": "averaged by nccl", "ledger": None, "last_step": None}
    model["watched"] = {"averages": "nccl", "verdict": told, "activities_s": waits, "rates_bps": []}
    return found


def test_who_is_slow_is_told_with_the_ranks_that_wait_least():
    lines = summary.as_lines(summary.summarize([watched_report(0), watched_report(1)]))
    assert lines[1:5] == [
        "DLCP watched Net: averaged by nccl",
        "  who is slow        rank 9 makes the others wait",
        "  ms per step        loading     waiting",
        "  rank 9                 1.0        10.0",
    ]
    assert lines[-1] == "  and 2 ranks that wait longer"


def test_without_steps_there_is_no_table():
    lines = summary.as_lines(summary.summarize([watched_report(0, steps=0, text="no verdict")]))
    assert lines[1:] == ["DLCP watched Net: averaged by nccl", "  who is slow        no verdict"]
