"""A KV receipt for people (a table) and for machines (JSON)."""

from typing import Any

from kv_transfer.choice import degraded
from kvferry_rpc.common_pb2 import KVReceipt, Migration
from router.dispatch.receipts import FINAL_FAILURE, json_fields


def receipt_dict(receipt: KVReceipt) -> dict[str, Any]:
    """Every field by its proto name, zeros included; the checksum in hexadecimal."""
    return json_fields(receipt)


def receipt_rows(receipt: KVReceipt) -> list[tuple[str, str]]:
    """The receipt as (label, value) rows in the order of a request's life."""
    moved = receipt.prefill_worker != receipt.decode_worker
    no_handoff = "none" if moved or not receipt.decode_worker else "none: prefill ran on the decode worker"
    checksum = receipt.checksum.hex() or "none"
    verified = "verified" if receipt.checksum_verified else "NOT VERIFIED"
    rows = [
        ("request_id", receipt.request_id),
        ("handoff_id", receipt.handoff_id or no_handoff),
        ("attempt", str(receipt.attempt)),
        ("prefill_worker", receipt.prefill_worker),
        ("decode_worker", receipt.decode_worker),
        ("plan_reason", receipt.plan_reason),
        ("transport", receipt.transport),
        ("transport_detail", receipt.transport_detail or "none"),
        ("expected_transport", _expected(receipt)),
        ("conversion", receipt.conversion or "none"),
        ("prompt_tokens", str(receipt.prompt_tokens)),
        ("prefill_cached_tokens", str(receipt.prefill_cached_tokens)),
        ("decode_cached_tokens", str(receipt.decode_cached_tokens)),
        ("pulled_tokens", str(receipt.pulled_tokens)),
        ("pull_ms", f"{receipt.pull_ms:.1f}"),
        ("tokens_recomputed", str(receipt.tokens_recomputed)),
        ("preempted_tokens", str(receipt.preempted_tokens)),
        ("blocks_sent", str(receipt.blocks_sent)),
        ("bytes_sent", f"{receipt.bytes_sent:,}"),
        ("checksum", f"{checksum} ({verified})" if moved else checksum),
        ("queue_ms", f"{receipt.queue_ms:.1f}"),
        ("prefill_ms", f"{receipt.prefill_ms:.1f}"),
        ("transfer_ms", f"{receipt.transfer_ms:.1f}"),
        ("exposed_transfer_ms", f"{receipt.exposed_transfer_ms:.1f}"),
        ("hidden_share", _hidden_share(receipt)),
        ("commit_ms", f"{receipt.commit_ms:.1f}"),
        ("decode_ms", f"{receipt.decode_ms:.1f}"),
    ]
    rows += [("migrations", _migration(migration)) for migration in receipt.migrations] or [("migrations", "none")]
    return rows + [
        ("failure" if failure.startswith(FINAL_FAILURE) else "earlier_failure", failure)
        for failure in receipt.earlier_failures
    ]


def _migration(migration: Migration) -> str:
    verified = "verified" if migration.checksum_verified else "NOT VERIFIED"
    return (
        f"{migration.from_worker} -> {migration.to_worker} after {migration.output_tokens} tokens: "
        f"{migration.blocks_sent} blocks, {migration.bytes_sent:,} bytes over {migration.transport} ({verified}), "
        f"{migration.tokens_recomputed} tokens recomputed, {migration.pause_ms:.1f} ms"
    )


def _hidden_share(receipt: KVReceipt) -> str:
    if receipt.transfer_ms <= 0:
        return "none: nothing was transferred"
    return f"{receipt.hidden_share:.0%} of the transfer ran behind prefill"


def _expected(receipt: KVReceipt) -> str:
    if not degraded(receipt.transport, receipt.expected_transport):
        return receipt.expected_transport or "none"
    return f"{receipt.expected_transport} (BUT {receipt.transport} WAS USED)"
