from kvferry.receipt_view import receipt_dict, receipt_rows
from kvferry_rpc.common_pb2 import KVReceipt, Migration


def _receipt() -> KVReceipt:
    return KVReceipt(
        request_id="r",
        handoff_id="h",
        prefill_worker="prefill-0",
        decode_worker="decode-0",
        transport="shm",
        bytes_sent=1234567,
        checksum=b"\xab\xcd",
        checksum_verified=True,
        transfer_ms=10.0,
        exposed_transfer_ms=2.5,
        hidden_share=0.75,
        earlier_failures=["attempt 1: prefill-1 was lost"],
    )


def test_every_field_of_the_receipt_is_in_its_json_form_zeros_included() -> None:
    value = receipt_dict(_receipt())
    assert list(value) == [field.name for field in KVReceipt.DESCRIPTOR.fields]
    assert value["tokens_recomputed"] == 0
    assert value["checksum"] == "abcd"
    assert value["exposed_transfer_ms"] == 2.5
    assert value["earlier_failures"] == ["attempt 1: prefill-1 was lost"]


def test_every_field_of_the_receipt_is_in_its_table() -> None:
    rows = receipt_rows(_receipt())
    labels = {label for label, _ in rows}
    expected = {field.name for field in KVReceipt.DESCRIPTOR.fields} - {"checksum_verified", "earlier_failures"}
    assert expected <= labels
    shown = dict(rows)
    assert shown["checksum"] == "abcd (verified)"
    assert shown["bytes_sent"] == "1,234,567"
    assert shown["exposed_transfer_ms"] == "2.5"
    assert shown["hidden_share"] == "75% of the transfer ran behind prefill"
    assert shown["earlier_failure"] == "attempt 1: prefill-1 was lost"


def test_moves_are_in_both_forms() -> None:
    receipt = _receipt()
    receipt.migrations.append(
        Migration(
            from_worker="decode-1",
            to_worker="decode-0",
            output_tokens=9,
            transport="shm",
            blocks_sent=3,
            bytes_sent=12288,
            checksum=b"\xef",
            checksum_verified=True,
            pause_ms=2.5,
        )
    )
    (moved,) = receipt_dict(receipt)["migrations"]
    assert list(moved) == [field.name for field in Migration.DESCRIPTOR.fields]
    assert (moved["from_worker"], moved["checksum"], moved["tokens_recomputed"]) == ("decode-1", "ef", 0)
    assert dict(receipt_rows(receipt))["migrations"] == (
        "decode-1 -> decode-0 after 9 tokens: 3 blocks, 12,288 bytes over shm (verified), 0 tokens recomputed, 2.5 ms"
    )
    assert dict(receipt_rows(_receipt()))["migrations"] == "none"


def test_without_a_transfer_none_of_it_is_said_to_have_been_exposed() -> None:
    receipt = _receipt()
    receipt.transfer_ms = receipt.exposed_transfer_ms = receipt.hidden_share = 0.0
    assert dict(receipt_rows(receipt))["hidden_share"] == "none: nothing was transferred"


def test_a_slower_transport_than_expected_shouts() -> None:
    receipt = _receipt()
    receipt.expected_transport = "shm"
    assert dict(receipt_rows(receipt))["expected_transport"] == "shm"
    receipt.transport = "tcp"
    assert dict(receipt_rows(receipt))["expected_transport"] == "shm (BUT tcp WAS USED)"
    receipt.transport, receipt.expected_transport = "shm", "tcp"
    assert dict(receipt_rows(receipt))["expected_transport"] == "tcp"


def test_an_unverified_checksum_shouts() -> None:
    receipt = _receipt()
    receipt.checksum_verified = False
    receipt.decode_ms = 12.0
    assert dict(receipt_rows(receipt))["checksum"] == "abcd (NOT VERIFIED)"


def test_a_request_that_failed_says_so_last_and_claims_no_hand_off() -> None:
    receipt = KVReceipt(request_id="r", earlier_failures=["attempt 1: x", "final: unavailable: y"])
    rows = receipt_rows(receipt)
    assert rows[-2:] == [("earlier_failure", "attempt 1: x"), ("failure", "final: unavailable: y")]
    assert dict(rows)["handoff_id"] == "none"


def test_a_local_prefill_claims_no_hand_off() -> None:
    receipt = KVReceipt(request_id="r", prefill_worker="decode-0", decode_worker="decode-0", transport="local")
    shown = dict(receipt_rows(receipt))
    assert shown["handoff_id"] == "none: prefill ran on the decode worker"
    assert shown["checksum"] == "none"
    assert shown["exposed_transfer_ms"] == "0.0"
