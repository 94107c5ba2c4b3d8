"""Clients in virtual time: requests begin and end as a server's do, and a policy chooses."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from exo_node.mtp.drafting.acceptance import Acceptance, Prior
from exo_node.mtp.drafting.costs import CostTable
from exo_node.mtp.drafting.round_policy import DraftDemand, Offer, RoundPolicy

MOST = 3
REQUESTS = 24
RUNS = 4
LENGTHS = 12, 64
"""Tokens of an answer."""
SEEDS = 3
PROMPT_S = 0.06
JOINED = 1.3
"""The first round after its members changed, in rounds."""


def of_demo(size: int, k: int) -> float:
    """Seconds of the demo's rounds on two cores, fitted to 1 to 8 requests and K of 0 to 3."""
    return 1e-3 * (13 + 3.5 * size + k * (4.5 + 2.6 * size))


def of_gpu(size: int, k: int) -> float:
    """Rows cost little."""
    return 1e-3 * (10 * (1 + 0.12 * k) + 0.15 * size * (k + 1))


MACHINES = {"demo": of_demo, "gpu": of_gpu}
ACCEPTANCE = {"demo": (0.72, 0.76, 0.76), "poor": (0.4, 0.3, 0.2)}


@dataclass
class Client:
    """One request: whether draft j at a token is right was drawn before, for every policy alike."""

    length: int
    position: int
    luck: Sequence[Sequence[float]]
    demand: DraftDemand
    done: int = 0

    @property
    def limit(self) -> int:
        return min(MOST, self.length - self.done - 1)

    def take(self, drafted: int, acceptance: Sequence[float]) -> int:
        """The accepted drafts of a round."""
        accepted = 0
        while accepted < drafted and self.luck[self.done][accepted] < acceptance[accepted]:
            accepted += 1
        if drafted and self.demand.acceptance is not None:
            self.demand.acceptance.add(drafted, accepted)
        self.done += 1 + accepted
        self.position += 1 + accepted
        return accepted


@dataclass
class Trace:
    """A server of one model; runs of requests follow each other."""

    machine: str
    acceptance: Sequence[float]
    policy: RoundPolicy | None
    """None: the best K, as if all were known."""
    seed: int
    prior: Prior = field(default_factory=Prior)
    rounds: Counter[tuple[int, int]] = field(default_factory=Counter[tuple[int, int]])
    """By (requests, K)."""
    tokens: int = 0
    seconds: float = 0.0

    def run(self, clients: int, number: int) -> None:
        draw, noise = random.Random(f"{self.seed}/{number}"), random.Random(self.seed + number)
        pending = [self._client(draw) for _ in range(REQUESTS)]
        live, is_changed = list[Client](), True
        while pending or live:
            if pending and len(live) < clients:  # one prompt between two rounds
                live.append(pending.pop(0))
                self.seconds, is_changed = self.seconds + PROMPT_S, True
            waiting = min(len(pending), clients - len(live))
            k = self._choose(live, len(live) + waiting)
            took = MACHINES[self.machine](len(live), k) * noise.lognormvariate(0, 0.1)
            took *= noise.choice([2, 3]) if noise.random() < 0.05 else 1
            took *= JOINED if is_changed else 1
            position = live[0].position if len(live) == 1 else 0
            counts = [client.take(min(k, client.limit), self.acceptance) for client in live]
            if self.policy is not None and (len(live) == 1 or not is_changed):
                self.policy.learn(len(live), position, k, k, took)
            self.seconds += took
            self.tokens += len(live) + sum(counts)
            self.rounds[len(live), k] += 1
            is_changed = any(client.done >= client.length for client in live)
            live = [client for client in live if client.done < client.length]

    def _client(self, draw: random.Random) -> Client:
        length, position = draw.randint(*LENGTHS), draw.randint(24, 100)
        luck = [[draw.random() for _ in range(MOST)] for _ in range(length)]
        return Client(
            length, position, luck, DraftDemand(MOST, "", Acceptance(MOST, self.prior), 2)
        )

    def _choose(self, live: Sequence[Client], running: int) -> int:
        if self.policy is None:
            most = max(client.limit for client in live)
            return max(range(most + 1), key=lambda k: self._rate(live, k))
        offers = [Offer(client.demand, client.limit) for client in live]
        return self.policy.choose(offers, live[0].position, running=running).k

    def _rate(self, live: Sequence[Client], k: int) -> float:
        tokens = sum(expected(self.acceptance, min(k, client.limit)) for client in live)
        return tokens / MACHINES[self.machine](len(live), k)


def expected(acceptance: Sequence[float], k: int) -> float:
    total, reached = 1.0, 1.0
    for share in acceptance[:k]:
        reached *= share
        total += reached
    return total


@pytest.mark.parametrize("clients", [2, 8, 16])
@pytest.mark.parametrize("acceptance", ACCEPTANCE)
@pytest.mark.parametrize("machine", MACHINES)
def test_clients_that_come_and_go_get_nearly_the_best_depth(
    machine: str, acceptance: str, clients: int
) -> None:
    """From the first request of a server on, with all that its trials cost."""
    shares, rates = ACCEPTANCE[acceptance], list[float]()
    for seed in range(SEEDS):
        probed = [MACHINES[machine](1, k) for k in range(MOST + 1)]
        pair = [
            Trace(machine, shares, policy, seed)
            for policy in (RoundPolicy(CostTable(probed)), None)
        ]
        for trace in pair:
            for number in range(RUNS):
                trace.run(clients, number)
        ours, best = (trace.tokens / trace.seconds for trace in pair)
        rates.append(ours / best)
    assert sum(rates) / len(rates) > 0.95, rates
