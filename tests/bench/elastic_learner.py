# SPDX-License-Identifier: Apache-2.0
"""Learn a task with ranks that come and go, and note every step and the accuracy; for the benchmark ``elastic``.

``elastic_learner NOTES TASK SEED PAUSE_S``: the file of its notes, a task of :mod:`dlcp.examples.learning_tasks`, the
seed of its data, and how much longer each step takes. It draws as many samples as the task's steps have on the ranks
of the beginning.
"""

import logging
import math
import os
import sys
import time

from tests.bench.elastic_rank import Notes, resident_bytes

OPTIMIZER = "adamw"


def learn() -> None:
    """Train, and test on the lowest rank."""
    notes = Notes(sys.argv[1])
    notes.note("python")
    import torch

    from dlcp.examples.learning_tasks import OPTIMIZER_MAKERS, RATE_WARM_UP_STEPS, TASKS, evaluate, loss_of
    from dlcp.torch import Elastic, ElasticSampler, parameter_digest

    notes.note("imported")
    logging.basicConfig(handlers=[notes, logging.StreamHandler()])
    torch.set_num_threads(1)
    task, seed, pause_s = TASKS[sys.argv[2]], int(sys.argv[3]), float(sys.argv[4])
    data, model = task.data(seed), task.network(seed)
    drawn = int(os.environ["WORLD_SIZE"]) * task.batch * task.steps
    epochs = max(1, round(drawn / len(data.train_labels)))
    samples = min(len(data.train_labels), drawn // epochs)
    rate = task.rates[OPTIMIZER]
    optimizer = OPTIMIZER_MAKERS[OPTIMIZER](list(model.parameters()), rate)
    sampler = ElasticSampler(samples, task.batch, seed=seed)
    with Elastic(model, optimizer, sampler=sampler) as training:
        group = training.group
        notes.note("begun", step=group.step, rank=group.rank, steps=task.steps)
        for _ in range(sampler.epoch, epochs):
            for batch in sampler:
                step, place = group.step, sampler.state_of(group.step)
                share = (place["epoch"] * samples + place["position"]) / (epochs * samples)
                warm = min(1.0, (step + 1) / RATE_WARM_UP_STEPS)
                optimizer.param_groups[0]["lr"] = rate * warm * 0.5 * (1 + math.cos(math.pi * share))
                optimizer.zero_grad()
                loss_of(model(data.train_inputs[batch]), data.train_labels[batch]).backward()  # type: ignore[no-untyped-call]  # PyTorch does not annotate it
                optimizer.step()
                notes.note("step", step=step, ranks=group.ranks, resident=resident_bytes())
                time.sleep(pause_s)
        accuracy, _ = evaluate(model, data) if group.rank == group.ranks[0] else (None, None)
        notes.note("end", digest=parameter_digest(model), accuracy=accuracy)


if __name__ == "__main__":
    learn()
