# SPDX-License-Identifier: Apache-2.0
"""Snapshots of ranks that do not exist, for tests of their readers."""

import json

from dlcp.session.snapshots import SNAPSHOT_SUFFIX, STEP_EDGES_S

COUNTS = {"sent": 1000, "delivered": 950, "lost": 50, "retransmitted": 30}
MODULES = [["embedding"], ["blocks.0.attention", "blocks.0.mlp"], ["head"]]


def snapshot(rank=0, ranks=2, steps=10, **changes):
    """A rank after so many steps of 0.1 s, a fifth of each waiting for the next rank and a tenth of that for nobody.

    Of what it has sent a twentieth was lost, most of it near the input.
    """
    peers = [peer for peer in range(ranks) if peer != rank]
    slowest = (rank + 1) % ranks
    classes = [0] * len(STEP_EDGES_S)
    classes[7] = steps
    path = {"local": False, "rate_bps": 8e7, "window_packets": 12.5, "rtt_s": 0.002, "paths": 12, "paths_left": 1}
    return {
        "rank": rank,
        "ranks": list(range(ranks)),
        "process_rank": rank,
        "process": 4000 + rank,
        "host": f"node{rank // 8}",
        "began_unix_s": 1.75e9,
        "every_s": 1.0,
        "session": "7-0123abcd",
        "written_unix_s": 1.75e9 + steps,
        "phase": "ready",
        "reason": "",
        "fallback": "the framework's own all-reduce",
        "route": "",
        "framework_steps": 0,
        "changes": [],
        "stood_s": 0.0,
        "step": steps,
        "steps": classes,
        "step_s": 0.1 * steps,
        "waiting_s": {str(slowest): 0.018 * steps, "": 0.002 * steps},
        "loss_bound": 0.1,
        "bound_exceeded": 0,
        "worst_loss": 0.08,
        "bits": 8,
        "by_bits": {"8": [600 * steps * len(peers), 30 * steps * len(peers)], "32": [400 * steps * len(peers), 0]},
        "packets": {str(peer): {name: steps * count for name, count in COUNTS.items()} for peer in peers},
        "layers": [
            [128 * place, names, *(count * steps for count in (300, (40, 10, 0)[place], 150))]
            for place, names in enumerate(MODULES)
        ],
        "peers": {str(peer): {**path, "worst_path_loss": 0.03} for peer in peers},
        "slow": None,
        "activities_s": {},
        "ended": False,
        "gave_up": None,
        **changes,
    }


def write(folder, *snapshots):
    """Write them as ranks do."""
    for each in snapshots:
        path = folder / f"rank-{each['process_rank']}-0{SNAPSHOT_SUFFIX}"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(each))
        part.replace(path)
