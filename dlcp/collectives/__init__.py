# SPDX-License-Identifier: Apache-2.0
"""All-reduce over bounded-loss messages: direct (sharded), ring, parameter server, or automatic choice.

:func:`make_reducer` makes the pipeline that averages buckets; each algorithm has its own module.
"""

from typing import TYPE_CHECKING

from dlcp import on_demand
from dlcp.collectives.bucket import Bucket, LayerBounds, RankContext, ReduceOptions, Reducer
from dlcp.collectives.choice import Topology
from dlcp.collectives.direct import DirectAllReduce
from dlcp.collectives.residual import Residual
from dlcp.collectives.shards import shard_bounds
from dlcp.collectives.stages import AutoAllReduce, Pipeline, make_reducer

if TYPE_CHECKING:
    from dlcp.collectives.parameter_server import ParameterServer
    from dlcp.collectives.ring import RingAllReduce

__all__ = [
    "AutoAllReduce",
    "Bucket",
    "DirectAllReduce",
    "LayerBounds",
    "ParameterServer",
    "Pipeline",
    "RankContext",
    "ReduceOptions",
    "Reducer",
    "Residual",
    "RingAllReduce",
    "Topology",
    "make_reducer",
    "shard_bounds",
]
__getattr__ = on_demand(__name__, {"ParameterServer": "parameter_server", "RingAllReduce": "ring"})
