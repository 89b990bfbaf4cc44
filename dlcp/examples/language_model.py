# SPDX-License-Identifier: Apache-2.0
"""Train a small recurrent language model, word by word, on the language reference that comes with Python.

The structure follows PyTorch's published word-level language model: a corpus, ``batchify``, ``get_batch``,
``evaluate``, ``train`` with clipped gradients, a learning rate that falls when validation stops improving, and the best
model kept. Run it with ``python language_model.py`` or ``torchrun --nproc-per-node 2 language_model.py``.
"""

import argparse
import math
import os
import re
import time
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

UNKNOWN_WORD = "<unk>"
Hidden = tuple[torch.Tensor, torch.Tensor]


class Corpus:
    """The words of Python's help texts, as numbers; nine tenths for training, the rest for validation."""

    def __init__(self, vocabulary: int) -> None:
        words = re.findall(r"[A-Za-z_]+|[0-9]+|[^\sA-Za-z0-9_]", " ".join(topics[name] for name in sorted(topics)))
        common = [word for word, _ in sorted(Counter(words).items(), key=lambda entry: (-entry[1], entry[0]))]
        self.words = [UNKNOWN_WORD, *common[: vocabulary - 1]]
        numbers = {word: number for number, word in enumerate(self.words)}
        text = torch.tensor([numbers.get(word, 0) for word in words])
        split = len(text) * 9 // 10
        self.train, self.valid = text[:split], text[split:]


class RNNModel(nn.Module):
    """An embedding, an LSTM and a linear layer to the vocabulary."""

    def __init__(self, vocabulary: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.layers, self.width = layers, width
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(vocabulary, width)
        self.rnn = nn.LSTM(width, width, layers, dropout=dropout)
        self.decoder = nn.Linear(width, vocabulary)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, words: torch.Tensor, hidden: Hidden) -> tuple[torch.Tensor, Hidden]:
        """Return scores, shape (length * batch, vocabulary), of words of shape (length, batch), and the new state."""
        output, hidden = self.rnn(self.drop(self.encoder(words)), hidden)
        return self.decoder(self.drop(output)).flatten(0, 1), hidden

    def init_hidden(self, batch: int) -> Hidden:
        """Return the state before the first word."""
        return torch.zeros(self.layers, batch, self.width), torch.zeros(self.layers, batch, self.width)


def batchify(text: torch.Tensor, batch: int) -> torch.Tensor:
    """Lay a text into ``batch`` columns, shape (words, batch); the rest is cut off."""
    length = len(text) // batch
    return text[: length * batch].view(batch, length).t().contiguous()


def get_batch(source: torch.Tensor, start: int, bptt: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return at most ``bptt`` rows of words, and each word's successor, flat."""
    length = min(bptt, len(source) - 1 - start)
    return source[start : start + length], source[start + 1 : start + 1 + length].reshape(-1)


def repackage_hidden(hidden: Hidden) -> Hidden:
    """Detach a state from its history."""
    return hidden[0].detach(), hidden[1].detach()


def evaluate(args: argparse.Namespace, model: RNNModel, source: torch.Tensor) -> float:
    """Return the mean loss per word."""
    model.eval()
    total = 0.0
    hidden = model.init_hidden(source.size(1))
    with torch.no_grad():
        for start in range(0, len(source) - 1, args.bptt):
            words, targets = get_batch(source, start, args.bptt)
            output, hidden = model(words, hidden)
            total += len(words) * nn.functional.cross_entropy(output, targets).item()
    return total / (len(source) - 1)


def train(args: argparse.Namespace, model: nn.Module, plain: RNNModel, source: torch.Tensor, epoch: int) -> None:
    """Train for one epoch by plain gradient descent."""
    model.train()
    total, began = 0.0, time.time()
    hidden = plain.init_hidden(args.batch_size)
    for batch, start in enumerate(range(0, len(source) - 1 - args.bptt, args.bptt)):
        if args.steps and batch == args.steps:
            break
        words, targets = get_batch(source, start, args.bptt)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(words, hidden)
        loss = nn.functional.cross_entropy(output, targets)
        loss.backward()  # type: ignore[no-untyped-call]  # PyTorch does not annotate it
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-args.lr)
        total += loss.item()
        if args.rank == 0 and (batch + 1) % args.log_interval == 0:
            mean, pace = total / args.log_interval, (time.time() - began) * 1000 / args.log_interval
            print(
                f"epoch {epoch}, batch {batch + 1}, lr {args.lr:.2f}, {pace:.0f} ms per batch, "
                f"loss {mean:.3f}, perplexity {math.exp(mean):.1f}",
                flush=True,
            )
            total, began = 0.0, time.time()


def main() -> None:
    """Read the arguments, train and validate."""
    parser = argparse.ArgumentParser(description="Word-level language model")
    parser.add_argument("--vocabulary", type=int, default=3000, help="size of the vocabulary, in words")
    parser.add_argument("--width", type=int, default=96, help="width of the embedding and of the LSTM")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=5.0)
    parser.add_argument("--clip", type=float, default=0.5, help="largest norm of the gradients")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="batches per epoch; 0 for all")
    parser.add_argument("--batch-size", type=int, default=16, help="columns per process")
    parser.add_argument("--bptt", type=int, default=24, help="words through which gradients are propagated back")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=20)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the best model to FILE")
    args = parser.parse_args()
    distributed = "RANK" in os.environ
    args.rank = int(os.environ.get("RANK", "0"))
    world = int(os.environ.get("WORLD_SIZE", "1"))

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    corpus = Corpus(args.vocabulary)
    share = len(corpus.train) // world  # every process reads its own part of the text
    source = batchify(corpus.train[args.rank * share : (args.rank + 1) * share], args.batch_size)
    valid = batchify(corpus.valid, 10)
    plain = RNNModel(len(corpus.words), args.width, args.layers, args.dropout)
    model: nn.Module = plain
    if distributed:
        dist.init_process_group(args.backend)
        model = DistributedDataParallel(plain)

    best = math.inf
    for epoch in range(1, args.epochs + 1):
        train(args, model, plain, source, epoch)
        loss = evaluate(args, plain, valid)
        if args.rank == 0:
            print(f"end of epoch {epoch}: valid loss {loss:.3f}, perplexity {math.exp(loss):.1f}", flush=True)
            if args.save and loss < best:
                torch.save(plain.state_dict(), args.save)
        if loss < best:
            best = loss
        else:
            args.lr /= 4  # all processes have the same model, so all decide alike

    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
