# SPDX-License-Identifier: Apache-2.0
"""One rank of the digits example with PyTorch, by DDP's own all-reduce and by DLCP; prints what came of it, as JSON."""

import json
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import dlcp.torch
from dlcp.examples.frameworks import load, torch_digits
from dlcp.torch.hook import parameter_digest


def trained(enable, seed):
    args = torch_digits.arguments(["--seed", seed])
    training, testing = load()
    model = DistributedDataParallel(torch_digits.network(args.seed))
    state = enable(model)
    torch_digits.train(model, training, args)
    found = {"accuracy": torch_digits.accuracy(model.module, testing), "weights": parameter_digest(model.module)}
    if state:
        found |= {"active": state.active, "steps": state.step, **state.ledger.summary()}
        state.close()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ways = {"gloo": lambda model: None, "dlcp": dlcp.torch.enable}
    print(json.dumps({name: [trained(way, seed) for seed in sys.argv[1:]] for name, way in ways.items()}), flush=True)
    dist.destroy_process_group()
