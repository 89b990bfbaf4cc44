# SPDX-License-Identifier: Apache-2.0
"""Lightning's DDP strategy with DLCP: ``Trainer(strategy="dlcp")`` after ``import dlcp.torch.lightning``."""

from typing import Any

from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch.nn.parallel import DistributedDataParallel

from dlcp.session.options import Options
from dlcp.torch.hook import enable
from dlcp.torch.state import State


class DlcpStrategy(DDPStrategy):
    """Lightning's ``DDPStrategy`` whose gradients DLCP averages while a model is fitted.

    Parameters
    ----------
    options
        By default ``Options()``.
    state
        A state from a checkpoint, to continue from; ``options`` replace its own if given.
    ddp
        Arguments of ``DDPStrategy``.

    Attributes
    ----------
    dlcp_state
        DLCP's state, to be kept with checkpoints; None before ``fit`` has begun.
    """

    strategy_name = "dlcp"

    def __init__(self, options: Options | None = None, *, state: State | None = None, **ddp: Any) -> None:
        super().__init__(**ddp)
        self._options, self.dlcp_state = options, state

    def configure_ddp(self) -> None:
        """Wrap the model as ``DDPStrategy`` does, and let DLCP average its gradients.

        Raises
        ------
        ValueError, RuntimeError
            See :func:`dlcp.torch.enable`.
        """
        super().configure_ddp()
        if isinstance(self.model, DistributedDataParallel):
            self.dlcp_state = enable(self.model, self._options, state=self.dlcp_state)

    def teardown(self) -> None:
        """Leave the other ranks."""
        if self.dlcp_state:
            self.dlcp_state.close()
        super().teardown()


StrategyRegistry.register("dlcp", DlcpStrategy, description="DDP whose gradients DLCP averages")
