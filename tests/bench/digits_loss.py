# SPDX-License-Identifier: Apache-2.0
"""Measure the additional training steps that loss costs: the demo's network on handwritten digits, with packet loss.

``python -m tests.bench.digits_loss`` trains and rewrites ``dlcp/convergence/measured.json``. It needs PyTorch and
scikit-learn. Four workers average their gradients. Each worker loses a share of its packets of 350 values: the least
valuable ones as in DLCP's switches, or random ones. Averages leave out the lost values, as in DLCP's receivers.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import nn

from dlcp import convergence
from dlcp.examples.learning_tasks import SMALL_TASKS, LabelledData, batches_of, evaluate

TASK: Final = SMALL_TASKS["digits"]
WORKERS: Final = 4
EPOCH_BATCH: Final = 64
"""Samples that a worker draws for a step."""
BATCH: Final = 16
"""How many of them it uses: few, so that runs take enough steps for their numbers to differ."""
PACKET_VALUES: Final = 350
LOSSES: Final = (0.0, 0.01, 0.1, 0.2, 0.3)
MODES: Final = {
    "digits_random": "packets lost at random, lost values left out of the average, nothing sent again later",
    "digits_least": "the least valuable packets lost, lost values left out of the average, nothing sent again later",
    "digits_feedback": "the least valuable packets lost, sent with the next step instead (error feedback)",
}
EVERY: Final = 4
"""Steps between accuracy tests."""


def steps_to_target(digits: LabelledData, mode: str, loss: float, seed: int, target: float, most: int) -> int:
    """Return the step of the first of three tests in a row that reach the target accuracy; ``most`` if none."""
    model = TASK.network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    own = list(batches_of(most, EPOCH_BATCH, len(digits.train_labels), seed, WORKERS))
    random = np.random.default_rng([seed, int(loss * 1000)])
    size = sum(parameter.numel() for parameter in model.parameters())
    residual = torch.zeros(WORKERS, size)
    reached = 0
    for step in range(most):
        gradients = torch.stack([_gradient(model, digits, own[step][rank][:BATCH]) for rank in range(WORKERS)])
        _assign(model, _average(gradients, residual, mode, loss, random))
        optimizer.step()
        if step % EVERY == EVERY - 1:
            reached = reached + 1 if evaluate(model, digits)[0] >= target else 0
            if reached == 3:
                return step + 1 - 2 * EVERY
    return most


def _gradient(model: nn.Module, digits: LabelledData, chosen: torch.Tensor) -> torch.Tensor:
    loss = nn.functional.cross_entropy(model(digits.train_inputs[chosen]), digits.train_labels[chosen])
    found = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([gradient.reshape(-1) for gradient in found])


def _assign(model: nn.Module, gradient: torch.Tensor) -> None:
    start = 0
    for parameter in model.parameters():
        parameter.grad = gradient[start : start + parameter.numel()].reshape(parameter.shape)
        start += parameter.numel()


def _average(
    gradients: torch.Tensor, residual: torch.Tensor, mode: str, loss: float, random: np.random.Generator
) -> torch.Tensor:
    """Return the average of the delivered values, and store the lost ones in ``residual`` for the next step."""
    feedback = mode == "digits_feedback"
    offered = gradients + residual if feedback else gradients
    count = -(-offered.shape[1] // PACKET_VALUES)
    padded = nn.functional.pad(offered, (0, count * PACKET_VALUES - offered.shape[1]))
    packets = padded.reshape(WORKERS, count, PACKET_VALUES)
    lost = round(loss * count)
    kept = torch.ones(WORKERS, count, dtype=torch.bool)
    for rank in range(WORKERS):
        if mode == "digits_random":
            gone = random.permutation(count)[:lost]
        else:
            # Queues overflow occasionally, not always for the same packets: drop from the least valuable 70 %.
            at_risk = torch.argsort(packets[rank].norm(dim=1))[: max(lost, round(count * 0.7))].numpy()
            gone = at_risk[random.permutation(len(at_risk))[:lost]]
        kept[rank, torch.from_numpy(gone)] = False
    mask = kept.repeat_interleave(PACKET_VALUES, 1)[:, : offered.shape[1]]
    if feedback:
        residual.copy_(offered * ~mask)
        return (offered * mask).sum(0) / WORKERS
    return (offered * mask).sum(0) / mask.sum(0).clamp(min=1)


def measure(seeds: int, target: float, most: int) -> dict[str, list[tuple[float, float, float]]]:
    """Return (loss, factor, standard error of the factor) by mode."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    clean = np.array(
        [steps_to_target(TASK.data(seed), "digits_random", 0.0, seed, target, most) for seed in range(seeds)]
    )
    for mode in MODES:
        found[mode] = [(0.0, 1.0, 0.0)]
        for loss in LOSSES[1:]:
            steps = np.array(
                [steps_to_target(TASK.data(seed), mode, loss, seed, target, most) for seed in range(seeds)]
            )
            ratios = steps / clean
            error = float(ratios.std(ddof=1) / np.sqrt(seeds))
            found[mode].append((loss, float(ratios.mean()), error))
            print(f"{mode} {loss:.0%}: {ratios.mean():.3f} +- {error:.3f}", file=sys.stderr, flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the curves and write them."""
    parser = argparse.ArgumentParser(description="Measure the steps to a target accuracy as a function of loss.")
    parser.add_argument("--seeds", type=int, default=5, help="number of runs, one per seed (default: 5)")
    parser.add_argument("--target", type=float, default=0.96, help="test accuracy to reach (default: 0.96)")
    parser.add_argument("--most", type=int, default=400, help="steps after which a run gives up (default: 400)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    entries = []
    for mode, points in measure(options.seeds, options.target, options.most).items():
        errors = ", ".join(f"{loss:.0%} {error:.3f}" for loss, _, error in points[1:])
        source = (
            f"Measured with python -m tests.bench.digits_loss --seeds {options.seeds} --target {options.target:g}:"
            f" the demo's network on scikit-learn's digits, {WORKERS} workers, {MODES[mode]}. Mean over "
            f"{options.seeds} seeds of the ratio of steps to a test accuracy of {options.target:.0%}; "
            f"standard errors: {errors}."
        )
        rounded = [[loss, round(factor, 3)] for loss, factor, _ in points]
        entries.append({"name": mode, "measured": True, "source": source, "points": rounded})
    convergence.write(Path(convergence.__file__).with_name("measured.json"), entries)
    return 0


if __name__ == "__main__":
    sys.exit(main())
