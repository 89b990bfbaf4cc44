# SPDX-License-Identifier: Apache-2.0
"""DLCP for JAX: a gradient transformation for optax that averages gradients over the ranks.

The lines that a training script needs::

    import dlcp.session
    import dlcp.jax

    group = dlcp.session.join()
    params = dlcp.jax.broadcast(params, group)
    optimizer = optax.chain(dlcp.jax.average_gradients(group), optax.adam(1e-3))

``dlcp launch -n 4 python script.py`` starts it on four ranks.
"""

from dlcp.jax.transformation import average_gradients, broadcast, forward_order, name_of
from dlcp.session import average_metrics

__all__ = ["average_gradients", "average_metrics", "broadcast", "forward_order", "name_of"]
