# SPDX-License-Identifier: Apache-2.0
"""DLCP for MXNet: a KVStore that sums gradients over all workers, each layer as soon as it is computed.

The lines that a training script needs::

    import dlcp.mxnet

    trainer = gluon.Trainer(model.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore="dist_dlcp")

``dlcp launch -n 4 python script.py`` starts it on four workers. As with MXNet's ``dist_sync``, gradients are summed:
``trainer.step`` takes the batch size of all workers together.
"""

from dlcp.mxnet.kvstore import NAME, Dist_DLCP

__all__ = ["NAME", "Dist_DLCP"]
