"""Flags of the router that `kvferry up` has too and passes on as they are."""

from dataclasses import dataclass, field, fields
from typing import Any


def _flag(help_text: str, kind: type = str, choices: tuple[str, ...] | None = None) -> Any:
    return field(default=None, metadata={"help": help_text, "kind": kind, "choices": choices})


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterFlags:
    """Each field is a flag of `python -m router` of the same name. None is not passed on: the router's default holds,
    and the router checks what it is given."""

    router_processes: int | None = _flag("Router processes behind the two ports. Default: 1.", int)
    process_port: int | None = _flag("With several: the first of the ports where each alone answers HTTP.", int)
    tool_parser: str | None = _flag(
        "How the model writes tool calls. Default: auto.", choices=("auto", "hermes", "llama3", "mistral", "none")
    )
    reasoning_parser: str | None = _flag("What becomes reasoning. Default: auto.", choices=("auto", "think", "none"))
    kv_forecast_tokens: int | None = _flag("Tokens ahead for which a decode worker must have KV room.", int)
    slo_interactive_ttft_s: float | None = _flag("Target of class interactive, to the first token.", float)
    slo_interactive_tpot_s: float | None = _flag("Its target for each token after it.", float)
    slo_batch_ttft_s: float | None = _flag("Target of class batch, to the first token.", float)
    slo_batch_tpot_s: float | None = _flag("Its target for each token after it.", float)

    @property
    def given(self) -> dict[str, Any]:
        """Those that were set."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in values.items() if value is not None}
