# SPDX-License-Identifier: Apache-2.0
"""``dlcp plan``: divide a model into the stages of a pipeline, and workers among the stages."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlcp.commands.common import MBPS, add, add_json, add_model_input, model_input, real, refuse, whole

if TYPE_CHECKING:
    from dlcp.sim.jobs.models import StepProfile
    from dlcp.sim.jobs.stage_planner import PipelinePlan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``dlcp plan``."""
    words = (
        "a published model, a profile that `dlcp sim profile` has written, or MODULE:FUNCTION, which is measured here"
    )
    parser.add_argument("model", metavar="MODEL", help=words)
    add(parser, "--workers", "N", whole(1, 1024), "workers", required=True)
    add(parser, "--rate-mbps", "MBPS", real(MBPS), "rate of each worker's link, or of each server's", required=True)
    add(parser, "--per-server", "N", whole(1, 1024), "workers in a server, which have a faster network inside it")
    add(parser, "--server-rate-mbps", "MBPS", real(MBPS), "rate between two workers of a server")
    add(parser, "--replicas", "N-N", str, "replicas of each stage, such as 3-1, instead of the best ones")
    add(parser, "--batch", "N", whole(1), "samples in a minibatch (default: as published or profiled; 32 if measured)")
    add(parser, "--gpu", "NAME", str, "GPU of a published model's computing times", default="v100")
    add(parser, "--gpu-precision", "NAME", str, "single or mixed", default="single")
    add_model_input(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Plan and print the stages; return the exit status, 2 for wrong use."""
    from dlcp.sim.jobs.models import ProfileError
    from dlcp.sim.jobs.stage_planner import NetworkLevel, parse_replicas, plan_pipeline

    bytes_per_s = arguments.rate_mbps * 1e6 / 8
    try:
        replicas = parse_replicas(arguments.replicas) if arguments.replicas else None
        if replicas and sum(replicas) != arguments.workers:
            raise ValueError(f"--replicas {arguments.replicas} does not add up to the {arguments.workers} workers")
        levels = [NetworkLevel(arguments.workers, bytes_per_s)]
        if (arguments.per_server is None) != (arguments.server_rate_mbps is None):
            raise ValueError("--per-server and --server-rate-mbps belong together; give both or neither")
        if arguments.per_server:
            if replicas or arguments.workers % arguments.per_server:
                raise ValueError("servers have to be full, and --replicas is for workers without servers")
            inside = NetworkLevel(arguments.per_server, arguments.server_rate_mbps * 1e6 / 8)
            levels = [inside, NetworkLevel(arguments.workers // arguments.per_server, bytes_per_s)]
        profile = _profile(arguments)
        if not profile.compute_s:
            raise ValueError(f"{arguments.model}: no layer computes, so no stages are faster; give layers their times")
        plan = plan_pipeline(profile, levels, replicas)
    except (ValueError, ProfileError) as error:
        return refuse("plan", error)
    data = plan_pipeline(profile, levels[-1:], [levels[-1].components]) if len(levels) == 1 else None
    print(json.dumps(_document(plan, data), indent=2) if arguments.json else _text(plan, data))
    return 0


def _profile(arguments: argparse.Namespace) -> "StepProfile":
    from dlcp.sim.jobs.models import measured_profile, read_profile, step_profile

    name: str = arguments.model
    if ":" in name:
        return measured_profile(name, model_input(arguments, arguments.batch or 32))
    if not name.endswith((".yaml", ".yml", ".json")):
        return step_profile(name, arguments.gpu, arguments.gpu_precision, arguments.batch)
    if arguments.batch:
        raise ValueError("--batch: a profile has its batch; leave it out")
    return read_profile(Path(name))


def _document(plan: "PipelinePlan", data: "PipelinePlan | None") -> dict[str, Any]:
    profile = plan.profile
    found = {
        "model": profile.name,
        "batch": profile.batch,
        "times": profile.source,
        "replicas": plan.replicas,
        "minibatch_s": plan.minibatch_s,
        "speedup": plan.speedup,
        "bytes_per_minibatch": plan.bytes_per_minibatch,
        "stages": [
            {
                "first_layer": profile.layers[stage.begin].name,
                "last_layer": profile.layers[stage.end - 1].name,
                "replicas": stage.replicas,
                "compute_s": plan.compute_s(stage),
                "parameters": plan.parameters(stage),
                "sends_bytes": profile.layers[stage.end - 1].output_bytes if stage is not plan.stages[-1] else 0,
                "versions": stage.in_flight,
            }
            for stage in plan.stages
        ],
    }
    if data:
        found["data_parallel"] = {"speedup": data.speedup, "bytes_per_minibatch": data.bytes_per_minibatch}
    return found


def _text(plan: "PipelinePlan", data: "PipelinePlan | None") -> str:
    found = _document(plan, data)
    lines = [
        f"{found['model']}, minibatches of {found['batch']}; times: {found['times']}",
        "",
        "stage  replicas  layers                          computes   parameters  passes on  versions kept",
    ]
    for number, stage in enumerate(found["stages"], 1):
        layers = " to ".join(dict.fromkeys((stage["first_layer"], stage["last_layer"])))
        compute_ms, passed_mb = stage["compute_s"] * 1e3, stage["sends_bytes"] / 1e6
        lines.append(
            f"{number:5}  {stage['replicas']:8}  {layers:30}{compute_ms:7.1f} ms  {stage['parameters']:11,}"
            f"  {passed_mb:6.2f} MB  {stage['versions']:13}"
        )
    lines += ["", f"{found['replicas']}: {found['speedup']:.2f} times the speed of one worker, by PipeDream's formula"]
    if data:
        over, less = plan.speedup / data.speedup, 1 - plan.bytes_per_minibatch / max(data.bytes_per_minibatch, 1)
        same = len(plan.stages) == 1
        words = (
            "which is data parallelism"
            if same
            else f"{over:.2f} times that of data parallelism, {less:.0%} fewer bytes"
        )
        lines[-1] += f"; {words}"
    starts = [stage["first_layer"] for stage in found["stages"][1:]]
    if starts:
        lines.append(f"later stages begin with the layers {', '.join(starts)}")
    return "\n".join(lines)
