"""When the tokens of an attempt may be given out: with strict hand-off not before both halves of its receipt are there
and prove it, so that what they refute never begins an answer."""

import math

from router.dispatch.inbox import Inbox
from router.dispatch.proof import HandoffRules, check_so_far, lacks_decode_half, lacks_prefill_half
from router.dispatch.receipts import AttemptRecord
from runtime.clock import Clock

# How long a finished answer, or the first token of a strict one, waits for what is missing of its receipt.
RECEIPT_WAIT_S = 1.0


class StrictGate:
    """Of one attempt. Event-loop task only."""

    def __init__(self, rules: HandoffRules, inbox: Inbox, clock: Clock) -> None:
        """`inbox` is the attempt's."""
        self._rules = rules
        self._inbox = inbox
        self._clock = clock
        self.is_open = not rules.strict

    def try_to_open(self, record: AttemptRecord) -> bool:
        """Whether it is open, now that `record` is known. Raises StrictRefusal when it never will be."""
        inbox = self._inbox
        check_so_far(self._rules, record)
        if inbox.verified is None:
            if inbox.decode_started:
                raise lacks_decode_half(record, "it went on without a word about what it received")
            return False
        if inbox.prefill_done is None:
            if inbox.prefill_failure is not None:
                raise lacks_prefill_half(record, inbox.prefill_failure.message)
            if self.patience_s() <= 0:
                raise lacks_prefill_half(record, f"it did not report within {RECEIPT_WAIT_S:g} s")
            return False
        self.is_open = True
        return True

    def patience_s(self) -> float:
        """How much longer the prefill half may take, once the decode worker has verified what came."""
        if self.is_open or self._inbox.verified_at is None:
            return math.inf
        return self._inbox.verified_at + RECEIPT_WAIT_S - self._clock.now()
