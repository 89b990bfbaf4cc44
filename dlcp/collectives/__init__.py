# SPDX-License-Identifier: Apache-2.0
"""All-reduce over bounded-loss messages: direct (sharded), around a ring, by a parameter server, or as suits."""

from dlcp.collectives.bucket import Bucket, ReduceOptions
from dlcp.collectives.choice import AutoAllReduce, Reducer, Topology, make_reducer
from dlcp.collectives.direct import DirectAllReduce
from dlcp.collectives.feedback import ErrorFeedback
from dlcp.collectives.ring import RingAllReduce
from dlcp.collectives.server import ParameterServer, ServerOptions
from dlcp.collectives.shards import shard_bounds

__all__ = [
    "AutoAllReduce",
    "Bucket",
    "DirectAllReduce",
    "ErrorFeedback",
    "ParameterServer",
    "ReduceOptions",
    "Reducer",
    "RingAllReduce",
    "ServerOptions",
    "Topology",
    "make_reducer",
    "shard_bounds",
]
