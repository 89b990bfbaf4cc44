# SPDX-License-Identifier: Apache-2.0
"""``dlcp sim new``: ask for a job and its network, and write the experiment."""

import argparse
from pathlib import Path

from dlcp.commands.common import add

NEW_OPTIONS = {
    "model": ("NAME", "network to train: resnet50, vgg16, transformer, bert_large and others"),
    "gpu": ("NAME", "GPU with a published throughput of the model: p100, v100, a100 or h100"),
    "workers": ("N", "number of workers, one GPU each"),
    "collective": ("NAME", "how gradients are reduced: direct, ring, parameter_server and others"),
    "fabric": ("NAME", "star, leaf_spine, fat_tree, dragonfly or rail_optimised"),
    "rate_gbps": ("RATE", "rate of each host's link in Gbit/s"),
    "transport": ("NAME", "dlcp, dctcp, cubic, swift, ndp, nscc, rccc and others"),
    "discipline": ("NAME", "how switches queue and drop (default: what the transport was made for)"),
}
"""The questions of `dlcp.sim.tools.guided`, whose names and defaults take a while to load."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``dlcp sim new``."""
    parser.epilog = "Each option answers a question; the others are asked."
    use = "YAML file to write (default: %(default)s)"
    parser.add_argument("file", metavar="FILE", nargs="?", type=Path, default=Path("experiment.yaml"), help=use)
    for name, (metavar, use) in NEW_OPTIONS.items():
        add(parser, f"--{name.replace('_', '-')}", metavar, str, use)
    parser.add_argument(
        "--yes", action="store_true", help="ask nothing: take the default of each option that is left out"
    )
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")
