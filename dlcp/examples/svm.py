# SPDX-License-Identifier: Apache-2.0
"""Train a support vector machine on any number of ranks, each with its own part of the samples.

In each round the ranks exchange their worst violators as sparse rows, solve the same small problem for the worst of
all, and update their own samples. Samples that will not change are eliminated, and reconstructed when the others have
converged (Vishnu et al., CLUSTER 2015). Run it with ``python -m dlcp.examples.svm``, or on four ranks with
``dlcp launch -n 4 python -m dlcp.examples.svm``.
"""

import argparse
import json
import time
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from sklearn.datasets import load_breast_cancer, load_digits

import dlcp.session

Values = NDArray[np.float64]
ROWS: Final = 64
"""Rows that a rank sends in a round, and samples of the small problem."""
ROW_FIELDS: Final = 5
"""Numbers of a row before its indices and values: whether it is filled, label, gradient, weight and sample number."""
TOLERANCE: Final = 1e-3
"""Largest violation of the optimality conditions, as in LIBSVM."""
ELIMINATION: Final = {"early": (10, 5), "lazy": (100, 50), "none": (1 << 62, 1)}
"""When samples are eliminated: the first round, and the rounds between two times."""


@dataclass(slots=True)
class Rows:
    """Samples that ranks have exchanged, n in all."""

    samples: Any
    labels: Values
    gradients: Values
    weights: Values
    numbers: NDArray[np.int64]

    def take(self, chosen: NDArray[np.int64]) -> "Rows":
        """Return a selection of these samples."""
        return Rows(*(getattr(self, name)[chosen] for name in self.__slots__))


@dataclass(slots=True)
class Solver:
    """One rank's part of the training.

    Parameters
    ----------
    samples, labels
        scipy.sparse.csr_matrix (n, features), and labels of -1 and 1, float64 (n,).
    first
        Number of this rank's first sample among those of all ranks.
    cost, gamma
        The largest weight of a sample, and gamma of the kernel exp(-gamma |x - y|^2).
    width
        The most values other than 0 in a sample of any rank.
    """

    group: dlcp.session.Group
    samples: Any
    labels: Values
    first: int
    cost: float
    gamma: float
    width: int
    elimination: str = "early"
    rounds: int = 0
    reconstructions: int = 0
    evaluations: int = 0
    eliminated: int = 0
    weights: Values = field(init=False)
    gradients: Values = field(init=False)
    norms: Values = field(init=False)
    active: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        """Begin with weights of zero."""
        self.weights = np.zeros(len(self.labels))
        self.gradients = -self.labels
        self.norms = squared_norms(self.samples)
        self.active = np.arange(len(self.labels))
        self.group.register(["rows"])

    def kernel(self, samples: Any, norms: Values, others: Any) -> Values:
        """Return the kernel of every two samples, float64 (n, others); ``norms`` are the samples' squared norms."""
        self.evaluations += samples.shape[0] * others.shape[0]
        products = samples @ others.T.tocsr().toarray()  # three times as fast as a product of two sparse matrices
        values: Values = np.exp(self.gamma * (2 * products - norms[:, None] - squared_norms(others)))
        return values

    def exchange(self, chosen: NDArray[np.int64]) -> Rows:
        """Return the samples that all ranks chose, at most `ROWS` each; set ``eliminated``."""
        slots = np.zeros((self.group.size, ROWS + 1, ROW_FIELDS + 2 * self.width))
        slots[self.group.rank, ROWS, 1] = len(self.labels) - len(self.active)
        mine = slots[self.group.rank, : len(chosen)]
        numbers = self.first + chosen
        mine[:, :ROW_FIELDS] = np.column_stack(
            [np.ones(len(chosen)), self.labels[chosen], self.gradients[chosen], self.weights[chosen], numbers]
        )
        for row, number in zip(mine, chosen.tolist(), strict=True):
            own = slice(self.samples.indptr[number], self.samples.indptr[number + 1])
            length = own.stop - own.start
            row[ROW_FIELDS : ROW_FIELDS + length] = self.samples.indices[own]
            row[ROW_FIELDS + self.width : ROW_FIELDS + self.width + length] = self.samples.data[own]
        self.group.average({"rows": slots})  # each rank filled its own slot, so the sum is all of them
        self.eliminated = int(slots[:, ROWS, 1].sum())
        every = slots[slots[:, :, 0] > 0]
        indices, values = every[:, ROW_FIELDS : ROW_FIELDS + self.width], every[:, ROW_FIELDS + self.width :]
        owner = np.repeat(np.arange(len(every)), self.width)
        shape = (len(every), self.samples.shape[1])
        rows = sparse.csr_matrix((values.ravel(), (owner, indices.ravel().astype(np.int64))), shape)
        labels, gradients, weights, numbers = every[:, 1:ROW_FIELDS].T.copy()
        return Rows(rows, labels, gradients, weights, numbers.astype(np.int64))

    def solve(self) -> tuple[Rows, float]:
        """Train; return all support vectors, and the threshold of the decision."""
        start, every = ELIMINATION[self.elimination]
        while True:
            rows = self.exchange(self._violators())
            up, low = free(rows.labels, rows.weights, self.cost)
            least, most = rows.gradients[up].min(), rows.gradients[low].max()
            if most - least <= 2 * TOLERANCE:
                if not self.eliminated:
                    return self._support_vectors(), (least + most) / 2
                self._reconstruct()
                start = self.rounds + start  # reconstructed samples may stay active for as long as at first
                continue
            self._improve(rows.take(worst(rows.gradients, rows.numbers, up, low)))
            self.rounds += 1
            if self.rounds >= start and self.rounds % every == 0:
                self._eliminate(least, most)

    def _violators(self) -> NDArray[np.int64]:
        """Return this rank's active samples that violate the optimality conditions most."""
        up, low = free(self.labels[self.active], self.weights[self.active], self.cost)
        return self.active[worst(self.gradients[self.active], self.active, up, low)]

    def _improve(self, rows: Rows) -> None:
        """Solve the problem for these samples alone, and apply the change of their weights."""
        inner = self.kernel(rows.samples, squared_norms(rows.samples), rows.samples)
        weights, gradients = rows.weights.copy(), rows.gradients.copy()
        up, low = free(rows.labels, weights, self.cost)
        for _ in range(20 * len(weights)):
            first = int(np.where(up, gradients, np.inf).argmin())
            second = int(np.where(low, gradients, -np.inf).argmax())
            violation = gradients[second] - gradients[first]
            if violation <= TOLERANCE:
                break
            curvature = max(inner[first, first] + inner[second, second] - 2 * inner[first, second], 1e-12)
            room = [
                self.cost - weights[each] if sign > 0 else weights[each]
                for each, sign in ((first, rows.labels[first]), (second, -rows.labels[second]))
            ]
            step = min(violation / curvature, *room)
            weights[first] += rows.labels[first] * step
            weights[second] -= rows.labels[second] * step
            pair = [first, second]
            up[pair], low[pair] = free(rows.labels[pair], weights[pair], self.cost)
            gradients += step * (inner[:, first] - inner[:, second])
        change = rows.labels * (weights - rows.weights)
        moved = np.flatnonzero(change)
        if len(self.active):
            columns = self.kernel(self.samples[self.active], self.norms[self.active], rows.samples[moved])
            self.gradients[self.active] += columns @ change[moved]
        own = (rows.numbers >= self.first) & (rows.numbers < self.first + len(self.labels))
        self.weights[rows.numbers[own] - self.first] = np.clip(weights[own], 0, self.cost)

    def _eliminate(self, least: float, most: float) -> None:
        """Stop updating samples at a bound from which no current sample could move them away."""
        labels, weights, gradients = (each[self.active] for each in (self.labels, self.weights, self.gradients))
        up, low = free(labels, weights, self.cost)
        settled = (up & ~low & (gradients > most)) | (low & ~up & (gradients < least))
        self.active = self.active[~settled]

    def _reconstruct(self) -> None:
        """Compute the gradients of eliminated samples from all support vectors, and make them active again."""
        vectors = self._support_vectors()
        lost = np.setdiff1d(np.arange(len(self.labels)), self.active)
        if len(lost):
            columns = self.kernel(self.samples[lost], self.norms[lost], vectors.samples)
            self.gradients[lost] = columns @ (vectors.labels * vectors.weights) - self.labels[lost]
        self.active = np.arange(len(self.labels))
        self.reconstructions += 1

    def _support_vectors(self) -> Rows:
        """Return the samples with a weight, of all ranks."""
        own = np.flatnonzero(self.weights > 0)
        found = []
        while True:
            found.append(self.exchange(own[:ROWS]))
            own = own[ROWS:]
            if not len(found[-1].labels):
                return Rows(
                    sparse.vstack([part.samples for part in found]),
                    *(np.concatenate([getattr(part, name) for part in found]) for name in Rows.__slots__[1:]),
                )


def squared_norms(samples: Any) -> Values:
    """Return each sample's squared norm."""
    norms: Values = np.asarray(samples.multiply(samples).sum(axis=1)).ravel()
    return norms


def free(labels: Values, weights: Values, cost: float) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return the samples whose product of label and weight may grow, and those whose may shrink."""
    below, above, positive = weights < cost, weights > 0, labels > 0
    return np.where(positive, below, above), np.where(positive, above, below)


def worst(
    gradients: Values, numbers: NDArray[np.int64], up: NDArray[np.bool_], low: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Return the samples that violate the optimality conditions most, as many of each kind."""
    order = np.lexsort((numbers, gradients))
    ends = order[up[order]][: ROWS // 2], order[low[order]][-(ROWS // 2) :]
    return np.unique(np.concatenate(ends))


def load(name: str, seed: int, texts: int) -> tuple[Any, Values, Any, Values]:
    """Return samples and labels for training, and for testing; ``texts`` is the size of the data "text"."""
    random = np.random.default_rng(seed)
    if name == "text":  # generated: two topics in a vocabulary of 5,000 words, 40 words a text, 5 % of labels wrong
        labels = random.choice([-1.0, 1.0], texts)
        common = 1 / np.arange(1, 5001) ** 0.9
        topics = {sign: common * random.lognormal(0, 0.5, 5000) for sign in (-1.0, 1.0)}
        ends = {sign: np.cumsum(topic) / topic.sum() for sign, topic in topics.items()}
        words = np.stack([np.searchsorted(ends[label], random.random(40)) for label in labels.tolist()])
        rows = np.repeat(np.arange(len(labels)), 40)
        samples = sparse.csr_matrix((np.ones(words.size), (rows, words.ravel())), (len(labels), 5000))
        samples = sparse.diags(1 / np.sqrt(squared_norms(samples))) @ samples
        labels *= np.where(random.random(len(labels)) < 0.05, -1, 1)
    else:
        data = load_digits() if name == "digits" else load_breast_cancer()
        odd = data.target % 2 == 1
        labels = np.where(odd, 1.0, -1.0)
        scale = data.data.std(axis=0)
        middle = 0 if name == "digits" else data.data.mean(axis=0)  # keeps the zeros of images
        samples = sparse.csr_matrix((data.data - middle) / np.where(scale, scale, 1))
    order = random.permutation(len(labels))
    cut = len(labels) * 4 // 5
    train, test = order[:cut], order[cut:]
    return samples[train], labels[train], samples[test], labels[test]


MADE_UP_TEXTS: Final = 12_000
"""Default number of samples of the generated data."""
COSTS: Final = {"digits": (10.0, 0.02), "cancer": (1.0, 0.03), "text": (5.0, 0.5)}
"""Cost and gamma by data set."""


def train(
    group: dlcp.session.Group, name: str, seed: int, elimination: str, texts: int = MADE_UP_TEXTS
) -> dict[str, Any]:
    """Train on this rank's share of the samples; return the results, equal on all ranks except for times."""
    samples, labels, test_samples, test_labels = load(name, seed, texts)
    ends = np.linspace(0, len(labels), group.size + 1).astype(int)
    own = slice(ends[group.rank], ends[group.rank + 1])
    cost, gamma = COSTS[name]
    width = int(np.diff(samples.indptr).max())
    solver = Solver(group, samples[own], labels[own], int(ends[group.rank]), cost, gamma, width, elimination)
    began_s = time.perf_counter()
    vectors, threshold = solver.solve()
    seconds = time.perf_counter() - began_s
    products = solver.kernel(test_samples, squared_norms(test_samples), vectors.samples)
    decisions = products @ (vectors.labels * vectors.weights) - threshold
    return {
        "ranks": group.size,
        "samples": len(labels),
        "accuracy": float((np.sign(decisions) == test_labels).mean()),
        "support_vectors": len(vectors.labels),
        "threshold": float(threshold),
        "rounds": solver.rounds,
        "reconstructions": solver.reconstructions,
        "kernel_evaluations": solver.evaluations,
        "row_bytes": 8 * (ROW_FIELDS + 2 * width),
        "dense_row_bytes": 8 * (ROW_FIELDS + samples.shape[1]),
        "seconds": seconds,
    }


def main() -> None:
    """Train, and print the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=list(COSTS), default="text")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--texts", type=int, default=MADE_UP_TEXTS, help="samples of the data 'text'")
    parser.add_argument("--eliminate", choices=list(ELIMINATION), default="early")
    arguments = parser.parse_args()
    # Weights are exact on all ranks only if nothing is lost, and nothing rounded.
    options = dlcp.session.Options(loss_bound=0.0, precision="32", combine="sum", fallback=False)
    with dlcp.session.join(options) as group:
        found = train(group, arguments.data, arguments.seed, arguments.eliminate, arguments.texts)
        if group.rank == 0:
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
