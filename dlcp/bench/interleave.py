# SPDX-License-Identifier: Apache-2.0
"""Contenders measured in turns, so that whatever else the machine does hits all of them alike; and the statistics."""

import random
import statistics
from collections.abc import Callable, Mapping, Sequence

Samples = dict[str, list[float]]
"""What was measured, by contender: one value a round, round by round."""


def interleave(
    contenders: Mapping[str, Callable[[], float]],
    *,
    rounds: int,
    warm_up: int = 2,
    seed: int = 1,
    progress: Callable[[str], None] | None = None,
) -> Samples:
    """Run every contender once a round, in an order that is drawn anew for each round.

    Parameters
    ----------
    contenders
        What each returns is its value in that round.
    rounds, warm_up
        Rounds that count, and rounds before them that do not.
    seed
        Of the orders.
    progress
        Is told about every round.

    Raises
    ------
    ValueError
        There is nothing to run.
    """
    if not contenders or rounds < 1 or warm_up < 0:
        raise ValueError(f"{len(contenders)} contenders, {rounds} rounds and {warm_up} before them: nothing to measure")
    samples: Samples = {name: [] for name in contenders}
    draw = random.Random(seed)
    for number in range(-warm_up, rounds):
        order = list(contenders)
        draw.shuffle(order)
        values = {name: contenders[name]() for name in order}
        if number >= 0:
            for name, value in values.items():
                samples[name].append(value)
        if progress:
            figures = ", ".join(f"{name} {values[name]:.4g}" for name in contenders)
            progress(f"{'warm-up' if number < 0 else f'round {number + 1} of {rounds}'}: {figures}")
    return samples


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return float(statistics.median(values))


def spread(values: Sequence[float]) -> float:
    """Return the interquartile range over the median; 0 of a single value."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / median(values)
