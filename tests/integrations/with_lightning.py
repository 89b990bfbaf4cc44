# SPDX-License-Identifier: Apache-2.0
"""A training script for Lightning: ``script.py FILE PRECISION STRATEGY``."""

import json
import logging
import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dlcp.torch.lightning

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(20, 200), nn.ReLU(), nn.Linear(200, 4))
        self.losses = []

    def training_step(self, batch, _):
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.model(inputs), targets)
        self.losses.append(self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean").item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2)


def main():
    lightning.seed_everything(3, verbose=False)
    inputs = torch.randn(96, 20)
    targets = inputs[:, :4].argmax(1)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=8)
    classifier = Classifier()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=sys.argv[3],
        max_epochs=3,
        precision=sys.argv[2],
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(classifier, loader)
    same = dlcp.torch.replicas_identical(classifier.model)
    if trainer.is_global_zero:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            found = {"losses": classifier.losses, "same": same, "ranks": trainer.world_size}
            if state := getattr(trainer.strategy, "dlcp_state", None):
                found |= {"steps": state.step, "delivered": state.ledger.summary()["delivered"]}
            json.dump(found, file)


if __name__ == "__main__":
    main()
