"""What this router has on each decode worker, beside what the worker last reported: the forecast's raw material.

A report is up to a quarter of a second old. What was sent there since is not in it yet, what ended since still is; both
are put right here. Event-loop thread only.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from router.admission.forecast import Demand, PoolState
from router.workers.worker_registry import PoolReport

_NO_SEQUENCE_LIMIT = 2**31


@dataclass(slots=True, eq=False)
class Expectation:
    """How long one request is and will probably become, in tokens, and where it runs. Made at its entry; the ledger
    keeps it up to date. `cached_tokens` tells how much of it a worker has cached; it is asked only when room is tight.
    """

    prompt_tokens: int
    expected: int
    most: int
    cached_tokens: Callable[[str], int]
    generated: int = 0
    worker_id: str | None = None
    shared_blocks: int = 0
    booked_blocks: int = 0  # Taken at its admission,
    growth_blocks: int = 0  # and after it, at most.

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + self.generated

    @property
    def remaining(self) -> int:
        return max(0, self.expected - self.generated)

    @property
    def demand(self) -> Demand:
        """What a worker that takes it now must hold."""
        return Demand(self.num_tokens, self.remaining, max(0, self.most - self.generated))


@dataclass(slots=True)
class _Account:
    """One worker's. `pending`: sent there since its last report; `ended_...`: in that report, and over since."""

    reported_at: float
    block_size: int
    sequences: dict[Expectation, None] = field(default_factory=dict)
    growth_blocks: int = 0
    pending: set[Expectation] = field(default_factory=set)
    pending_blocks: int = 0
    ended_blocks: int = 0
    ended_sequences: int = 0

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


class KVLedger:
    """The accounts of all decode workers."""

    def __init__(self, reported_at: Callable[[str], float | None]) -> None:
        """`reported_at` tells when a worker reported last; None when it is not attached."""
        self._reported_at = reported_at
        self._accounts: dict[str, _Account] = {}

    def __len__(self) -> int:
        """Requests that are accounted for."""
        return sum(len(account.sequences) for account in self._accounts.values())

    def place(self, expectation: Expectation, worker_id: str, block_size: int, shared_blocks: int) -> None:
        """The request goes to that worker, which has so many blocks of it cached. It leaves the one it was on."""
        self.leave(expectation)
        account = self._account(worker_id, block_size)
        blocks_now = account.blocks_for(expectation.num_tokens + 1)
        expectation.worker_id = worker_id
        expectation.shared_blocks = shared_blocks
        expectation.booked_blocks = max(0, blocks_now - shared_blocks)
        account.sequences[expectation] = None
        account.pending.add(expectation)
        account.pending_blocks += expectation.booked_blocks
        self._book_growth(account, expectation)

    def leave(self, expectation: Expectation, *, was_taken: bool = True) -> None:
        """The request is on no worker any more, or (not `was_taken`) never got room there. Idempotent."""
        worker_id, expectation.worker_id = expectation.worker_id, None
        account = self._accounts.get(worker_id) if worker_id is not None else None
        if account is None or worker_id is None:
            return
        self._sync(worker_id, account)
        del account.sequences[expectation]
        account.growth_blocks -= expectation.growth_blocks
        expectation.growth_blocks = 0
        if expectation in account.pending:
            account.pending.discard(expectation)
            account.pending_blocks -= expectation.booked_blocks
        elif was_taken:
            account.ended_sequences += 1
            held = account.blocks_for(expectation.num_tokens) - expectation.shared_blocks
            account.ended_blocks += max(0, held)
        if not account.sequences and self._reported_at(worker_id) is None:
            del self._accounts[worker_id]

    def generated(self, expectation: Expectation, count: int) -> None:
        """It has `count` more tokens. One that outgrows what was expected is expected to grow by a quarter more."""
        expectation.generated += count
        if expectation.generated > expectation.expected:
            longer = expectation.generated + expectation.generated // 4 + 1
            expectation.expected = max(expectation.generated, min(expectation.most, longer))
            if expectation.worker_id is not None:
                self._book_growth(self._accounts[expectation.worker_id], expectation)

    def pool(self, report: PoolReport) -> PoolState:
        """The worker's pool as it probably is now."""
        register, load = report.register, report.load
        account = self._account(report.worker_id, register.layout.block_size)
        sequences = load.sequences_running + load.sequences_waiting + load.sequences_receiving
        here = max(0, sequences - account.ended_sequences) + len(account.pending)
        available = load.blocks_free + load.blocks_cached + account.ended_blocks - account.pending_blocks
        if load.sequences_waiting:  # They were taken, and have no blocks yet.
            available -= account.blocks_for(load.tokens_waiting)
        return PoolState(
            worker_id=report.worker_id,
            block_size=account.block_size,
            num_blocks=register.num_blocks,
            available=min(register.num_blocks, available),
            slots_free=(register.max_num_seqs or _NO_SEQUENCE_LIMIT) - here,
            growing=here,
            most_growth=account.growth_blocks,
            sequences=account.sequences.keys(),
        )

    def worker_left(self, worker_id: str) -> None:
        """The worker is gone. What was on it leaves one by one, and the last of them takes the account along."""
        account = self._accounts.get(worker_id)
        if account is not None and not account.sequences:
            del self._accounts[worker_id]

    def _account(self, worker_id: str, block_size: int) -> _Account:
        account = self._accounts.get(worker_id)
        if account is None:
            account = _Account(self._reported_at(worker_id) or 0.0, block_size)
            self._accounts[worker_id] = account
        else:
            self._sync(worker_id, account)
        return account

    def _sync(self, worker_id: str, account: _Account) -> None:
        """A report that came since the last look has all that was sent before, and nothing that had ended."""
        reported_at = self._reported_at(worker_id)
        if reported_at is not None and reported_at != account.reported_at:
            account.reported_at = reported_at
            account.pending.clear()
            account.pending_blocks = account.ended_blocks = account.ended_sequences = 0

    @staticmethod
    def _book_growth(account: _Account, expectation: Expectation) -> None:
        """What it can still take, at most. It shrinks as the sequence grows, but that is left to the sweep."""
        now = account.blocks_for(expectation.num_tokens)
        growth = account.blocks_for(expectation.num_tokens + expectation.remaining) - now
        account.growth_blocks += growth - expectation.growth_blocks
        expectation.growth_blocks = growth
