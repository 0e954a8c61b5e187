"""What `kvferry doctor --model` says of a model. `report_model` loads torch: call it in a process of its own."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.errors import KvferryError

_MIB = 1024**2


def report_model(source: str, available_bytes: int | None) -> dict[str, Any]:
    """The report for --json. `available_bytes`: free memory, None = unknown. For a model that cannot be served: `ok`
    False, and the `reason`."""
    from engine.model_survey import survey_model

    try:
        survey = survey_model(source, available_bytes)
    except KvferryError as error:
        return {"ok": False, "model": source, "reason": error.message}
    shape = survey.shape
    code = _cpu_code()
    return {
        "ok": True,
        "model": source,
        "name": survey.name,
        "way": survey.way.value,
        "reason": survey.reason,
        "family": shape.family,
        "num_layers": shape.num_layers,
        "num_q_heads": shape.num_q_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_context_tokens": shape.max_context_tokens,
        "windows": [layer.window for layer in shape.attention],
        "num_parameters": survey.num_parameters,
        "weight_bytes": survey.weight_bytes,
        "kv": [
            {
                "dtype": cost.dtype,
                "bytes_per_token": cost.bytes_per_token,
                "tokens_in_default_pool": cost.tokens_in_default_pool,
            }
            for cost in survey.kv
        ],
        "attention": code,
        "operations": code if survey.way.value == "native" else "transformers",
    }


def model_lines(report: Mapping[str, Any]) -> list[str | list[tuple[str, ...]]]:
    """The report for people: lines and tables."""
    if not report["ok"]:
        return [f"{report['model']} cannot be served: {report['reason']}"]
    facts: list[tuple[str, ...]] = [
        ("path", _way(report)),
        ("layers", f"{report['num_layers']}: {_windows(report['windows'])}"),
        (
            "heads",
            f"{report['num_q_heads']} for queries, {report['num_kv_heads']} for keys and values, "
            f"{report['head_dim']} numbers each",
        ),
        ("context", f"{report['max_context_tokens']:,} tokens, vocabulary {report['vocab_size']:,}"),
        ("weights", f"{report['num_parameters']:,} parameters: {_sizes(report['weight_bytes'])}"),
        ("attention", f"on a CPU: {report['attention']}"),
        ("operations", f"on a CPU: {report['operations']}"),
    ]
    costs = [
        (cost["dtype"], f"{cost['bytes_per_token']:,}", f"{cost['tokens_in_default_pool']:,}") for cost in report["kv"]
    ]
    return [
        f"{report['name']} ({report['family']}) can be served.",
        "",
        facts,
        "",
        [("KV cache", "bytes a token", "tokens in this machine's default pool"), *costs],
    ]


def _way(report: Mapping[str, Any]) -> str:
    if report["way"] == "native":
        return "native"
    return f"through transformers, slower; not native: {report['reason']}"


def _windows(windows: Sequence[int | None]) -> str:
    counts = Counter(windows)
    if len(counts) == 1:
        return f"all see {_span(windows[0])}"
    return ", ".join(f"{number} see {_span(window)}" for window, number in counts.items())


def _span(window: int | None) -> str:
    return "the whole context" if window is None else f"the last {window:,} tokens"


def _sizes(weight_bytes: Mapping[str, int]) -> str:
    return ", ".join(f"{size / _MIB:,.1f} MiB in {dtype}" for dtype, size in weight_bytes.items())


def _cpu_code() -> str:
    """Who computes attention and the other operations of a native model on this machine's CPU."""
    from engine.native import NativeUnavailable, kernels

    try:
        return f"C ({kernels().instructions})"
    except NativeUnavailable as error:
        return f"torch, without the C kernels: {error}"
