"""Entries of a `config.json`, read one at a time and checked. Everything raises KvferryError naming the entry."""

import math
from collections.abc import Mapping
from typing import Any

from engine.model_config import RopeConfig, RopeKind, unusable

_MAX_DIMENSION = 1 << 24


def count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number from 1 to 2^24. A missing entry, or null, is the default; without one it is refused."""
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_DIMENSION:
        raise unusable(f"config.json: {key} must be a whole number from 1 to {_MAX_DIMENSION}, not {value!r}")
    return value


def positive(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A finite number above 0; missing or null as with `count`."""
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise unusable(f"config.json: {key} must be a positive number, not {value!r}")
    return float(value)


def flag(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """True or false; missing or null is the default."""
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, bool):
        raise unusable(f"config.json: {key} must be true or false, not {value!r}")
    return value


def windows(config: Mapping[str, Any], num_layers: int, window: int | None, implied: list[bool]) -> list[int | None]:
    """The window of each layer: `layer_types` where it is given, else `window` for the layers of `implied`.

    `window` None = no layer has one. Raises KvferryError for other kinds of layers and for one that lacks its window.
    """
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = ["sliding_attention" if slides and window else "full_attention" for slides in implied]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise unusable(f"config.json: layer_types must be a list of {num_layers}, one a layer, not {kinds!r}")
    unknown = [kind for kind in kinds if kind not in ("sliding_attention", "full_attention")]
    if unknown:
        raise unusable(f"layers of type {unknown[0]!r} are not supported")
    if window is None and "sliding_attention" in kinds:
        raise unusable("config.json: layer_types asks for sliding windows, but sliding_window is not set or off")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def rope(config: Mapping[str, Any], max_context_tokens: int) -> RopeConfig:
    """The one rotary embedding of all layers."""
    # transformers 5 writes one `rope_parameters`; before, `rope_theta` stood beside an optional `rope_scaling`.
    values = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        raise unusable(f"config.json: rope parameters must be one flat object for all layers, not {values!r}")
    return rope_of(config, values, positive(config, "rope_theta", 10000.0), max_context_tokens)


def rope_of(config: Mapping[str, Any], values: Mapping[str, Any], theta: float, max_context_tokens: int) -> RopeConfig:
    """A rotary embedding from its own entries `values`; `theta` is used where they have none."""
    name = values.get("rope_type", values.get("type", "default"))
    kinds = {kind.value: kind for kind in RopeKind}
    if not isinstance(name, str) or name not in kinds:
        raise unusable(f"rotary embedding of type {name!r} is not supported; supported: {', '.join(kinds)}")
    if values.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise unusable("partial rotary embedding (partial_rotary_factor) is not supported")
    theta = positive(values, "rope_theta", theta)
    kind = kinds[name]
    if kind is RopeKind.DEFAULT:
        return RopeConfig(theta)
    if kind is RopeKind.LINEAR:
        return RopeConfig(theta, kind, positive(values, "factor"))
    original = "original_max_position_embeddings"
    scaled = RopeConfig(
        theta=theta,
        kind=kind,
        factor=positive(values, "factor"),
        low_freq_factor=positive(values, "low_freq_factor"),
        high_freq_factor=positive(values, "high_freq_factor"),
        # Some checkpoints keep this one beside the rope parameters; transformers then prefers it.
        original_context_tokens=count(
            config if config.get(original) is not None else values, original, max_context_tokens
        ),
    )
    if scaled.high_freq_factor <= scaled.low_freq_factor:
        raise unusable("config.json: llama3 rope needs high_freq_factor above low_freq_factor")
    return scaled
