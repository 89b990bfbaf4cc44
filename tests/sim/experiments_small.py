# SPDX-License-Identifier: Apache-2.0
"""A small experiment that runs in a second or two."""

from pathlib import Path

PROFILE = """\
name: small
batch: 4
source: made up for this test
layers:
  - {name: front, parameters: 20000, forward_s: 1e-5, backward_s: 2e-5}
  - {name: middle, parameters: 50000, forward_s: 1e-5, backward_s: 2e-5}
  - {name: back, parameters: 100000, forward_s: 1e-5, backward_s: 2e-5}
"""
EXPERIMENT = """\
name: small
title: A small one
question: Does it run?
setting:
  topology: {kind: leaf_spine, leaves: 2, spines: 2, hosts_per_leaf: 4, host_link: {rate_gbps: 10}}
  transports:
    tcp: {kind: cubic}
    dlcp: {kind: dlcp}
  training:
    - {name: job, model: PROFILE, workers: 4, collective: ring, scheduler: fifo, transport: tcp, steps: 2, jitter: 0.1}
  traffic:
    - {name: others, load: 0.2, most_bytes: 100000, transport: tcp, stop_s: 0.002}
axes:
  - name: scheduler
    points:
      - {name: FIFO}
      - {name: DLCP, set: {training.0.scheduler: dlcp, training.*.transport: dlcp, switches.discipline: dlcp,
         training.0.loss_bound: 0.1}}
  - name: rate
    points:
      - {name: slow}
      - {name: fast, set: {topology.host_link.rate_gbps: 40}}
quick: {only: {rate: [slow]}}
figures:
  - {title: Step time, metric: step_s, x: rate, series: scheduler}
  - {title: Speed, metric: step_s, x: rate, series: scheduler, relative_to: FIFO, inverse: true, kind: lines}
claims:
  - {name: faster, metric: step_s, ours: {scheduler: DLCP}, theirs: {scheduler: FIFO}, form: speedup_percent, paper: 10,
     source: made up}
  - {name: best, metric: step_s, ours: {scheduler: DLCP}, theirs: {scheduler: FIFO}, form: speedup_percent, over: best,
     source: made up}
"""


def write_experiment(folder: Path, text: str = EXPERIMENT) -> Path:
    """Write the experiment and its profile; return the experiment's file."""
    profile = folder / "profile.yaml"
    profile.write_text(PROFILE, encoding="utf-8")
    path = folder / "small.yaml"
    path.write_text(text.replace("PROFILE", str(profile)), encoding="utf-8")
    return path
