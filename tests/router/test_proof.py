"""What an answer must prove: each clause of strict hand-off, and what holds without it."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvferry_rpc.common_pb2 import ErrorCode
from kvferry_rpc.internal_pb2 import DecodeDone, HandoffVerified, PrefillDone
from router.dispatch.proof import Clause, HandoffRules, StrictRefusal, check_so_far, check_whole
from router.dispatch.receipts import AttemptRecord
from router.policy import Plan
from runtime.errors import KvferryError

LAX, STRICT = HandoffRules(), HandoffRules(strict=True)
REMOTE = Plan("decode-0", "prefill-0", "because")
LOCAL = Plan("decode-0", None, "nobody else")


def sent(**changes: object) -> PrefillDone:
    values = {"transport": "nixl", "expected_transport": "nixl", "checksum": b"digest", **changes}
    return PrefillDone(**values)  # type: ignore[arg-type]


def verified(**changes: object) -> HandoffVerified:
    return HandoffVerified(**{"checksum_verified": True, "checksum": b"digest", "transport": "nixl", **changes})  # type: ignore[arg-type]


def done(**changes: object) -> DecodeDone:
    return DecodeDone(**{"checksum_verified": True, "checksum": b"digest", **changes})  # type: ignore[arg-type]


GOOD = AttemptRecord(1, REMOTE, "handoff", sent(), done(), 1.0, 2.0, verified=verified())


def refusal(record: AttemptRecord, rules: HandoffRules = STRICT) -> StrictRefusal:
    with pytest.raises(StrictRefusal) as caught:
        check_whole(rules, record)
    assert caught.value.code == ErrorCode.HANDOFF_FAILED
    assert caught.value.field == caught.value.clause.value
    return caught.value


def test_a_whole_hand_off_is_proof() -> None:
    for rules in (LAX, STRICT, HandoffRules(True, ("nixl",)), HandoffRules(True, ("shm", "nixl"))):
        check_whole(rules, GOOD)


def test_an_answer_that_was_cut_is_proven_by_what_the_decode_worker_said_before_it() -> None:
    check_whole(STRICT, replace(GOOD, decode_done=None))


@pytest.mark.parametrize(
    ("record", "clause", "said"),
    [
        (replace(GOOD, plan=LOCAL), Clause.LOCAL_PREFILL, "decode-0 computed the prompt itself: nobody else"),
        (replace(GOOD, decode_done=done(tokens_recomputed=16)), Clause.RECOMPUTED, "16 prompt tokens"),
        (replace(GOOD, decode_done=done(checksum_verified=False)), Clause.UNVERIFIED, "did not verify"),
        (replace(GOOD, verified=verified(checksum_verified=False)), Clause.UNVERIFIED, "from prefill-0"),
        (replace(GOOD, prefill_done=sent(checksum=b"other")), Clause.DIGESTS, b"other".hex()),
        (replace(GOOD, prefill_done=sent(checksum=b"other"), decode_done=None), Clause.DIGESTS, b"digest".hex()),
        (replace(GOOD, prefill_done=sent(transport="tcp")), Clause.TRANSPORT, "over tcp, and nixl was expected"),
        (replace(GOOD, prefill_done=None), Clause.PREFILL_HALF, "no receipt from prefill-0"),
        (replace(GOOD, verified=None, decode_done=None), Clause.DECODE_HALF, "no receipt from decode-0"),
    ],
)
def test_each_clause_is_refused_by_its_name_when_strict_and_let_pass_when_not(
    record: AttemptRecord, clause: Clause, said: str
) -> None:
    error = refusal(record)
    assert (error.clause, said in error.message) == (clause, True), error.message
    if clause is not Clause.DIGESTS:
        check_whole(LAX, record)


def test_two_digests_of_one_hand_off_are_a_defect_even_when_nothing_is_strict() -> None:
    record = replace(GOOD, prefill_done=sent(checksum=b"other"))
    with pytest.raises(KvferryError) as caught:
        check_whole(LAX, record)
    assert caught.value.code == ErrorCode.INTERNAL
    unverified = {"decode_done": done(checksum_verified=False, checksum=b""), "verified": None}
    check_whole(LAX, replace(record, **unverified))


@pytest.mark.parametrize(
    ("required", "used", "good"),
    [
        ((), "nixl", True),
        ((), "shm", True),  # Better than expected.
        ((), "tcp", False),
        (("nixl",), "nixl", True),
        (("nixl",), "shm", False),  # Exactly these.
        (("shm", "tcp"), "tcp", True),
        (("nixl",), "", False),
    ],
)
def test_the_transport_must_be_one_of_those_required_or_as_good_as_expected(
    required: tuple[str, ...], used: str, good: bool
) -> None:
    rules = HandoffRules(True, required)
    record = replace(GOOD, prefill_done=sent(transport=used), verified=None)
    if good:
        check_whole(rules, record)
    else:
        assert refusal(record, rules).clause is Clause.TRANSPORT
    check_whole(HandoffRules(False, required), record)


def test_a_refused_transport_is_told_with_both_workers_and_all_that_would_have_done() -> None:
    message = refusal(GOOD, HandoffRules(True, ("shm", "ucx"))).message
    assert "from prefill-0 to decode-0 over nixl, and shm or ucx is required" in message


Changes = Callable[[AttemptRecord], AttemptRecord]


@pytest.mark.parametrize(
    "missing",
    [
        lambda record: replace(record, prefill_done=None),
        lambda record: replace(record, verified=None, decode_done=None),
        lambda record: replace(record, prefill_done=None, verified=None, decode_done=None),
    ],
)
def test_what_may_still_come_is_not_held_against_anybody(missing: Changes) -> None:
    check_so_far(STRICT, missing(GOOD))


def test_the_decode_workers_word_alone_shows_a_transport_that_will_not_do() -> None:
    early = replace(GOOD, prefill_done=None, decode_done=None)
    with pytest.raises(StrictRefusal) as caught:
        check_so_far(HandoffRules(True, ("shm",)), early)
    assert caught.value.clause is Clause.TRANSPORT
