"""Structured output: grammars compiled off the engine's thread, and the state of one answer in its grammar.

1. The door checks what can be checked without a compiler (`runtime.grammar_limits`).
2. A grammar that is new here is tried in a child process (`engine.grammar_trial`), then compiled in this one, on a
   thread of its own; the last ones are kept.
3. The constraint is put behind the output so far by replaying it: after a hand-off, a migration or a preemption the
   text goes on as if nothing had happened.
4. The sampler asks which tokens may come next. End-of-text may come only where the grammar is complete.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import BoundedSemaphore, Lock
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from engine.grammar_backend import GrammarBackend, is_installed
from engine.grammar_process import TrialProcess
from engine.prepared_model import PreparedModel
from engine.vocabulary import read_vocabulary
from kvferry_rpc.common_pb2 import ErrorCode, Grammar
from runtime.errors import KvferryError, invalid
from runtime.grammar_limits import grammar_field

if TYPE_CHECKING:
    import xgrammar

COMPILE_LIMIT_S: Final = 10.0
_MAX_PENDING: Final = 64
_MAX_CACHED: Final = 128
_MAX_CACHED_BYTES: Final = 256 * 2**20
# Of the engine's thread: one request must not hold up all others. The usual is a tenth of a millisecond a token.
_MAX_STEP_S: Final = 0.2
_MAX_MEAN_STEP_S: Final = 0.01
_SPARE_S: Final = 2.0

_log = logging.getLogger(__name__)


class GrammarConstraint:
    """The `engine.sequence.TokenConstraint` of one answer. One thread at a time.

    Once it was led along a token that the grammar does not allow, or masks took too long, it allows nothing: the
    sampler then fails this answer alone.
    """

    def __init__(self, matcher: "xgrammar.GrammarMatcher", mask: NDArray[np.int32]) -> None:
        """Takes both over. `matcher` is at the start of the answer; `mask` int32 [1, ceil(vocab / 32)]."""
        self._matcher = matcher
        self._mask = mask
        self._bits: NDArray[np.uint32] = mask.view(np.uint32)[0]
        self._num_strayed = 0  # tokens advanced over since the first that was not allowed
        self._is_current = False
        self._is_unbounded = False
        self._too_slow = False
        self._num_masks = 0
        self._spent_s = 0.0

    @property
    def is_lost(self) -> bool:
        """Whether a token came that the grammar does not allow."""
        return self._num_strayed > 0

    def allowed(self) -> NDArray[np.uint32] | None:
        """See the protocol. [ceil(vocab / 32)], never written by the caller; all zero when nothing may follow."""
        if not self._is_current:
            self._fill()
            self._is_current = True
        return None if self._is_unbounded else self._bits

    def advance(self, token_id: int) -> None:
        """See the protocol. A token that is not allowed loses the constraint, until it is rewound over."""
        self._is_current = False
        if self._num_strayed or self._matcher.is_terminated() or not self._matcher.accept_token(token_id):
            self._num_strayed += 1

    def rewind(self, num_tokens: int) -> None:
        """See the protocol. Raises ValueError for more tokens than were advanced over."""
        self._is_current = False
        strayed = min(num_tokens, self._num_strayed)
        self._num_strayed -= strayed
        if num_tokens > strayed:
            try:
                self._matcher.rollback(num_tokens - strayed)
            except RuntimeError as error:
                raise ValueError(f"cannot go back {num_tokens} tokens") from error

    def _fill(self) -> None:
        self._is_unbounded = False
        if self._num_strayed or self._too_slow or self._matcher.is_terminated():
            self._mask.fill(0)
            return
        started = time.thread_time()
        self._is_unbounded = not self._matcher.fill_next_token_bitmask(self._mask)
        step_s = time.thread_time() - started
        self._num_masks += 1
        self._spent_s += step_s
        if step_s > _MAX_STEP_S or self._spent_s > _SPARE_S + self._num_masks * _MAX_MEAN_STEP_S:
            _log.warning("a grammar took %.0f ms for a token: its answer ends here", step_s * 1000)
            self._too_slow = True
            self._fill()


class GrammarCompiler:
    """Makes constraints for one model. Event-loop thread, but for `close` and the private parts that say otherwise."""

    def __init__(self, model: PreparedModel, trial: TrialProcess | None = None) -> None:
        """Reads, imports and starts nothing until the first grammar comes. Takes `trial` over, if given: where new
        grammars are tried."""
        self._model = model
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._slots = BoundedSemaphore(_MAX_PENDING)
        self._trial = trial or TrialProcess(model)
        self._backend: GrammarBackend | None = None  # of the pool's thread, once it is made of any
        self._lock = Lock()  # of the cache
        self._cache: OrderedDict[tuple[int, str], xgrammar.CompiledGrammar] = OrderedDict()
        self._cached_bytes = 0

    async def constraint(self, grammar: Grammar, output_token_ids: Sequence[int] = ()) -> GrammarConstraint:
        """The constraint of an answer that has `output_token_ids` already. `grammar` passed `check_grammar`.

        Raises KvferryError: INVALID_REQUEST naming the field for a grammar that cannot be used or an output that it
        does not allow, OVERLOADED when too many are waiting. Cancelling leaves nothing behind.
        """
        if not self._model.eos_token_ids:
            raise invalid(grammar_field(grammar), "cannot be used: this model has no end-of-text token")
        compiled = self._find(grammar)
        if compiled is None:
            compiled = await self._compile_later(grammar)
        assert self._backend is not None
        constraint = GrammarConstraint(self._backend.matcher(compiled), self._backend.new_mask())
        output = list(output_token_ids)
        if output:
            await asyncio.to_thread(_replay, constraint, output)
        return constraint

    def close(self) -> None:
        """Drop what waits and end the child process. Any thread; idempotent; a compilation under way is waited for."""
        self._trial.interrupt()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._trial.close()

    async def _compile_later(self, grammar: Grammar) -> "xgrammar.CompiledGrammar":
        if not self._slots.acquire(blocking=False):
            raise KvferryError(
                ErrorCode.OVERLOADED, "too many grammars are waiting to be compiled", retry_after_ms=1000
            )
        try:
            future = self._pool.submit(self._compile, grammar)
        except RuntimeError as error:  # the pool is closed
            self._slots.release()
            raise KvferryError(ErrorCode.UNAVAILABLE, "this worker is shutting down") from error
        # The slot belongs to the work, not to the caller: a cancelled caller may leave work running.
        future.add_done_callback(self._release)
        return await asyncio.wrap_future(future)

    def _release(self, _: Any) -> None:
        self._slots.release()

    def _compile(self, grammar: Grammar) -> "xgrammar.CompiledGrammar":
        """Pool thread only."""
        # Several answers with one new grammar arrive together: the first compiles it for all.
        compiled = self._find(grammar)
        if compiled is not None:
            return compiled
        if not is_installed():
            lack = "is not supported by this server: its workers lack xgrammar (pip install 'kvferry[structured]')"
            raise invalid(grammar_field(grammar), lack)
        self._trial.start()
        if self._backend is None:
            vocabulary = read_vocabulary(
                self._model.tokenizer_path,
                self._model.tokenizer_config_path,
                vocab_size=self._model.shape.vocab_size,
                eos_token_ids=self._model.eos_token_ids,
            )
            self._backend = GrammarBackend(vocabulary)
        self._trial.check(grammar, COMPILE_LIMIT_S)
        compiled = self._backend.compile(grammar)
        self._keep(grammar, compiled)
        return compiled

    def _find(self, grammar: Grammar) -> "xgrammar.CompiledGrammar | None":
        key = (int(grammar.kind), grammar.text)
        with self._lock:
            compiled = self._cache.get(key)
            if compiled is not None:
                self._cache.move_to_end(key)
            return compiled

    def _keep(self, grammar: Grammar, compiled: "xgrammar.CompiledGrammar") -> None:
        with self._lock:
            self._cache[int(grammar.kind), grammar.text] = compiled
            self._cached_bytes += compiled.memory_size_bytes
            while len(self._cache) > _MAX_CACHED or self._cached_bytes > _MAX_CACHED_BYTES:
                _, oldest = self._cache.popitem(last=False)
                self._cached_bytes -= oldest.memory_size_bytes


def _replay(constraint: GrammarConstraint, output_token_ids: list[int]) -> None:
    """Raises KvferryError (INVALID_REQUEST) for an output that the grammar does not allow."""
    for token_id in output_token_ids:
        constraint.advance(token_id)
    if constraint.is_lost:
        raise invalid("num_output_tokens", "counts output that the grammar does not allow")
