"""Whether transformers can compute a model over the paged pool, found out without its weights.

The model is built on the `meta` device, where tensors have shapes and no numbers, and asked for one token. What its
layers then ask of attention says how they look back; what they ask beyond that is a reason to refuse.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from engine.model_config import ModelShape, unusable
from engine.models.transformers_attention import ATTENTION_NAME, Question, answering, import_transformers, quiet

# Rotary embeddings whose angles depend on the longest sequence of a batch: what is cached would not stay true.
_ROPES_OF_THE_BATCH = ("dynamic", "longrope")


def probe_shape(directory: Path) -> ModelShape:
    """Read `config.json` in `directory` and find out the model's shape. Reads no weights; takes about a second, and a
    few more when transformers is not imported yet.

    Raises KvferryError with the reason for a model that cannot run this way.
    """
    transformers = import_transformers()
    with quiet():
        config = _read_config(transformers, directory)
        _refuse_by_config(config)
        network = _build(transformers, config)
        notes = _Notes()
        token = torch.zeros(1, 1, dtype=torch.int64, device="meta")
        try:
            with answering(notes), torch.inference_mode():
                logits = network(input_ids=token, position_ids=token, use_cache=False).logits
        except Exception as error:  # it is foreign code: it may raise anything
            raise unusable(f"a forward pass of {type(network).__name__} fails: {error}") from error
    return _shape(config, notes.questions, logits.shape[-1])


@dataclass(slots=True)
class _Notes:
    """Answers with nothing, and remembers the questions."""

    questions: list[Question] = field(default_factory=list)

    def attend(self, question: Question) -> Tensor:
        self.questions.append(question)
        q = question.q
        return q.new_empty(q.shape[0], q.shape[2], q.shape[1], question.v.shape[-1])


def _read_config(transformers: ModuleType, directory: Path) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # as above: its checks of a config are many and raise what they like
        raise unusable(f"transformers cannot read config.json: {error}") from error


def _refuse_by_config(config: Any) -> None:
    known = config.to_dict()
    if known.get("quantization_config"):
        raise unusable("config.json has a quantization_config: quantised safetensors are not supported")
    if known.get("is_encoder_decoder") or known.get("add_cross_attention"):
        raise unusable(f"{config.model_type} has an encoder: only decoder-only models are supported")
    if known.get("num_kv_shared_layers"):
        raise unusable(f"{config.model_type} shares K and V between layers")
    if known.get("attention_chunk_size"):
        raise unusable(f"{config.model_type} attends within chunks (attention_chunk_size)")
    ropes = [known.get("rope_parameters") or {}]
    for rope in _nested(ropes):
        name = rope.get("rope_type")
        if name in _ROPES_OF_THE_BATCH:
            raise unusable(f"rotary embedding of type {name!r} depends on the longest sequence of a batch")


def _nested(values: list[Any]) -> Iterator[Mapping[str, Any]]:
    for value in values:
        if isinstance(value, Mapping):
            yield value
            yield from _nested(list(value.values()))


def _build(transformers: ModuleType, config: Any) -> Any:
    try:
        with torch.device("meta"):
            # In bf16 because transformers' grouped products of experts have no other type on this device.
            network = transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation=ATTENTION_NAME, dtype=torch.bfloat16, trust_remote_code=False
            )
    except Exception as error:  # as above
        if isinstance(error, KeyError) and ATTENTION_NAME in error.args:
            raise unusable(f"{config.model_type} chooses among attentions of its own") from error
        raise unusable(f"transformers cannot build a {config.model_type} that generates text: {error}") from error
    made, asked = type(network).__name__, config.architectures
    if asked and asked != [made]:
        raise unusable(f"architectures {asked!r} cannot generate text; expected [{made!r}]")
    # Only for a warning about padding, which reads numbers that are not there.
    network.config.pad_token_id = None
    return network.eval()


def _shape(config: Any, questions: list[Question], vocab_size: int) -> ModelShape:
    name, num_layers = config.model_type, config.num_hidden_layers
    if len(questions) != num_layers:
        raise unusable(
            f"{name} has {num_layers} layers, but asks for attention {len(questions)} times: "
            "layers without attention, or with attention of their own, are not supported"
        )
    first = questions[0]
    for question in questions:
        if question.beyond is not None:
            raise unusable(f"{name} asks for {question.beyond}")
        if question.k.shape[-1] != question.v.shape[-1]:
            raise unusable(f"{name} has keys of {question.k.shape[-1]} numbers and values of {question.v.shape[-1]}")
        if (question.q.shape, question.k.shape) != (first.q.shape, first.k.shape):
            raise unusable(f"{name} has layers with different numbers or sizes of heads")
    windows = [question.layer.window for question in questions]
    promised = _promised_windows(config.to_dict(), num_layers)
    if promised != windows:
        raise unusable(f"{name} asks for the windows {windows} of attention, but its config.json says {promised}")
    context = config.max_position_embeddings if "max_position_embeddings" in _names(config) else None
    if not isinstance(context, int) or context < 1:
        raise unusable("config.json does not say how long a context may be (max_position_embeddings)")
    if vocab_size != config.vocab_size:
        raise unusable(f"{name} has {vocab_size} logits for a vocabulary of {config.vocab_size}")
    return ModelShape(
        family=name,
        vocab_size=vocab_size,
        num_layers=num_layers,
        num_q_heads=first.q.shape[1],
        num_kv_heads=first.k.shape[1],
        head_dim=first.k.shape[-1],
        max_context_tokens=context,
        attention=tuple(question.layer for question in questions),
    )


def _names(config: Any) -> set[str]:
    """Entries of a config, under transformers' common names too."""
    return set(config.to_dict()) | set(config.attribute_map)


def _promised_windows(config: Mapping[str, Any], num_layers: int) -> list[int | None]:
    """What the configuration says of windows: a model could also keep them to its masks, which are not made here."""
    window = config.get("sliding_window")
    kinds = config.get("layer_types")
    if kinds is None:
        on = window is not None and config.get("use_sliding_window") is not False
        return [window if on else None] * num_layers
    unknown = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
    if unknown:
        raise unusable(f"layers of type {unknown[0]!r} are not supported")
    return [window if kind == "sliding_attention" else None for kind in kinds]
