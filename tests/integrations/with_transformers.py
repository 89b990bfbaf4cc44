# SPDX-License-Identifier: Apache-2.0
"""A training script for Hugging Face's Trainer: ``script.py FILE WHERE``; WHERE is ``callback`` if it enables DLCP."""

import json
import sys
import tempfile

import torch
import transformers

import dlcp.torch


class DlcpCallback(transformers.TrainerCallback):
    """The lines that docs/pytorch.md adds to a script."""

    def on_train_begin(self, *_, **__):
        self.state = dlcp.torch.enable(trainer.model_wrapped)

    def on_train_end(self, *_, **__):
        self.state.close()


transformers.logging.set_verbosity_error()
torch.manual_seed(3)
rows = torch.randint(0, 16, (96, 1)) + torch.arange(12)  # so that every token follows from the one before
dataset = [{"input_ids": row, "labels": row} for row in rows % 32]
config = transformers.GPT2Config(
    vocab_size=32, n_positions=12, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
)
with tempfile.TemporaryDirectory() as folder:
    options = transformers.TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        num_train_epochs=3,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=3,
    )
    trainer = transformers.Trainer(transformers.GPT2LMHeadModel(config), options, train_dataset=dataset)
    if sys.argv[2] == "callback":
        trainer.add_callback(callback := DlcpCallback())
    trainer.train()
same = dlcp.torch.replicas_identical(trainer.model)
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
if trainer.is_world_process_zero():
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        found = {"losses": losses, "same": same, "ranks": options.world_size}
        if sys.argv[2] == "callback":
            found |= {"steps": callback.state.step, "delivered": callback.state.ledger.summary()["delivered"]}
        json.dump(found, file)
