# SPDX-License-Identifier: Apache-2.0
"""Run files as the demo might write them, drawn from a seed; no training."""

import numpy as np

LAYERS = {
    0: ("conv1", 320),
    28: ("norm1", 64),
    57: ("conv2", 18496),
    85: ("norm2", 128),
    113: ("conv3", 73856),
    142: ("norm3", 256),
    170: ("conv4", 221376),
    198: ("norm4", 384),
    227: ("fc1", 196864),
    255: ("fc2", 2570),
}
TITLES = {
    "gloo": "Gloo over TCP",
    "plain": "DLCP's transport, used plainly",
    "dlcp": "DLCP, held to its fair share",
    "dlcp_priority": "DLCP, ahead of the background",
}
STEP_S = {"gloo": 1.1, "plain": 0.55, "dlcp": 0.36, "dlcp_priority": 0.27}
TAIL = {"gloo": 0.55, "plain": 0.3, "dlcp": 0.12, "dlcp_priority": 0.1}
BACKGROUND = {"gloo": 0.97, "plain": 1.02, "dlcp": 0.99, "dlcp_priority": 0.61}
LOSS_BY_CLASS = (0.0, 0.001, 0.004, 0.012, 0.03, 0.07, 0.16, 0.31)


def make_run(name, seed=1, steps=120):
    """One run's file."""
    draw = np.random.default_rng([seed, sorted(TITLES).index(name)])
    durations = STEP_S[name] * np.exp(draw.normal(-(TAIL[name] ** 2) / 2, TAIL[name], steps))
    total = float(durations.sum())
    fair_bps = 3.0e7
    times = np.arange(1, int(total / 0.1) + 1) * 0.1
    bursts = [[start, min(start + 4.0, total), int(draw.integers(4))] for start in np.arange(0, total, 4.6).tolist()]
    on = np.any([(times > a) & (times <= b) for a, b, _ in bursts], axis=0)
    rates = on * fair_bps * BACKGROUND[name] * np.clip(draw.normal(1, 0.22, len(times)), 0, 1.6)
    tagged = name.startswith("dlcp")
    by_class = [[int(6000 * share), 0] for share in (0.45, *[0.08] * 7)]
    by_class = [[n, int(n * rate) if tagged else 0] for (n, _), rate in zip(by_class, LOSS_BY_CLASS, strict=True)]
    lost = sum(row[1] for row in by_class)
    sent = steps * 4 * 4 * 360
    scale = sent / sum(row[0] for row in by_class)
    by_class = [[int(n * scale), int(k * scale), int(n * scale) // 2] for n, k in by_class]
    lost = sum(row[1] for row in by_class)
    values = sum(count for _, count in LAYERS.values())
    by_layer = {}
    for position, (_, count) in LAYERS.items():
        packets = max(1, round(sent * count / values))
        rate = 0 if count < 1024 or not tagged else lost / sent * (1.3 - position / 255 * 0.8)
        by_layer[str(position)] = [packets, int(packets * rate), packets // 2 if tagged else 0]
    spread = {"plain": lambda p: 0.45 + 0.4 * (1 - p / 255), "dlcp": lambda p: 0.35 + 0.45 * p / 255}
    order = spread.get("dlcp" if tagged else name)
    policy = int(lost * 0.9) if tagged else 0
    tail = {"gloo": 5200, "plain": 3900, "dlcp": 1100, "dlcp_priority": 1500}[name]
    forwarded = sent + int(total * fair_bps / 12000)
    ordinary_tail = tail if not tagged else int(tail * 0.8)
    return {
        "name": name,
        "title": TITLES[name],
        "seed": seed,
        "collective": "direct",
        "fabric": {"kind": "namespaces", "workers": 4, "rate_bps": 5e7, "depth_packets": 64, "mtu": 1500},
        "background": {
            "flows": 2,
            "bps": float(rates[on].mean()),
            "fair_share_bps": fair_bps,
            "samples": np.column_stack([times, rates]).tolist(),
            "bursts": bursts,
        },
        "curve": make_curve(durations, np.random.default_rng([seed, 9]), tagged, draw),
        "steps": durations.tolist(),
        "compute_seconds": draw.uniform(0.05, 0.07, steps).tolist(),
        "parameters": values,
        "gradient_bytes": 4 * values,
        "replicas_identical": True,
        "final_accuracy": 0.975,
        "ledger": None
        if name == "gloo"
        else {
            "sent": sent + 400,
            "delivered": sent - lost,
            "lost": lost,
            "retransmitted": 400,
            "max_message_ratio": 0.1 * draw.uniform(0.9, 0.99) if tagged else 0.0,
            "violations": 0,
            "by_bits": {"8": [6 * sent // 10, 3 * lost // 4], "32": [4 * sent // 10, lost - 3 * lost // 4]}
            if tagged
            else {"32": [sent, 0]},
            "by_class": by_class if tagged else [[sent, 0, 0], *[[0, 0, 0]] * 7],
            "by_layer": by_layer,
            "bound": 0.1 if tagged else 0.0,
        },
        "layer_names": {str(position): layer for position, (layer, _) in LAYERS.items()},
        "layer_seconds": None
        if order is None
        else {str(p): (durations * order(p) * draw.uniform(0.9, 1.1, steps)).tolist() for p in LAYERS},
        "switch": {
            "tail_drops": tail,
            "policy_drops": policy,
            "policy_drops_by_class": [0, *[policy // 7] * 7],
            "marked": int(forwarded * 0.04),
            "over_share": int(sent * 0.21) if name == "dlcp" else 0,
            "forwarded": forwarded,
            "busy": 0.41,
            "late_max_s": 0.0041,
            "by_queue": {
                "1": {"packets": forwarded, "bytes": forwarded * 1200, "tail_drops": ordinary_tail},
                "6": {"packets": sent, "bytes": sent * 1400, "tail_drops": tail - ordinary_tail},
            },
        },
        "program_digest": "5f2c" * 16,
        "versions": {"python": "3.11.2", "torch": "2.13.0", "kernel": "6.1.0", "dlcp": "0.1.0"},
        "command": f"dlcp demo --seed {seed}",
    }


def make_curve(durations, noise, tagged, draw):
    """Test accuracy after every second step: fast at first, then flat, with the noise of 360 images."""
    ends = np.concatenate([[0], np.cumsum(durations)])
    curve = []
    for step in range(0, len(durations) + 1, 2):
        learned = 0.975 - 0.875 * np.exp(-step / (17 if tagged else 16))
        wobble = noise.normal(0, 0.012) * (1 - step / len(durations)) + (draw.normal(0, 0.003) if tagged else 0)
        accuracy = 0.1 if step == 0 else round(360 * float(np.clip(learned + wobble, 0, 1))) / 360
        curve.append({"step": step, "seconds": float(ends[step]), "accuracy": accuracy, "loss": 2.3 * (1 - accuracy)})
    curve[-1]["accuracy"] = 0.975
    return curve


def make_runs(seed=1, steps=120, gloo=True):
    """All runs of one demo."""
    return {name: make_run(name, seed, steps) for name in TITLES if gloo or name != "gloo"}
