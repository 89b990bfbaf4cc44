# SPDX-License-Identifier: Apache-2.0
"""All-reduce over bounded-loss messages: direct (sharded) and by a parameter server."""

from dlcp.collectives.direct import Bucket, DirectAllReduce, ReduceOptions
from dlcp.collectives.feedback import ErrorFeedback
from dlcp.collectives.server import ParameterServer, ServerOptions
from dlcp.collectives.shards import shard_bounds

__all__ = [
    "Bucket",
    "DirectAllReduce",
    "ErrorFeedback",
    "ParameterServer",
    "ReduceOptions",
    "ServerOptions",
    "shard_bounds",
]
