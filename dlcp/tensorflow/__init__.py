# SPDX-License-Identifier: Apache-2.0
"""DLCP for TensorFlow: Keras 3 optimizers that average gradients over the ranks, in ``model.fit`` or your own loop.

The lines that a training script needs, with names as in Horovod::

    import dlcp.tensorflow as dlcp

    dlcp.init()
    model.compile(dlcp.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss)
    model.fit(x[dlcp.rank() :: dlcp.size()], y[dlcp.rank() :: dlcp.size()], callbacks=[
        dlcp.BroadcastGlobalVariablesCallback(0),
        dlcp.StatisticsAverageCallback(),  # with BatchNormalization
        dlcp.MetricAverageCallback(),
    ])

``dlcp launch -n 4 python script.py`` starts it on four ranks.
"""

from dlcp.session import current, init, local_rank, rank, shutdown, size
from dlcp.tensorflow.callbacks import (
    BroadcastGlobalVariablesCallback,
    MetricAverageCallback,
    StatisticsAverageCallback,
    average_metrics,
    broadcast_variables,
)
from dlcp.tensorflow.optimizer import DistributedOptimizer, load_model

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "DistributedOptimizer",
    "MetricAverageCallback",
    "StatisticsAverageCallback",
    "average_metrics",
    "broadcast_variables",
    "current",
    "init",
    "load_model",
    "local_rank",
    "rank",
    "shutdown",
    "size",
]
