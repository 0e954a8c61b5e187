"""The place where transformers' models ask for attention, and how to answer there.

transformers looks attention up by name for every layer of every forward pass. kvferry registers one function under its
own name; it hands each question to whoever answers at that moment: a step over the paged pool, or a probe that only
looks. As no mask function has that name, transformers makes no masks.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from torch import Tensor, nn

from engine.attention.interface import LayerAttention
from engine.model_config import unusable

ATTENTION_NAME = "kvferry"


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """What one layer asks. q [1, num_q_heads, T, head_dim], k and v [1, num_kv_heads, T, head_dim], rotated."""

    q: Tensor
    k: Tensor
    v: Tensor
    layer: LayerAttention
    # What the answer would have to heed beyond LayerAttention; None when there is nothing.
    beyond: str | None


class Answers(Protocol):
    """Answers the questions of a forward pass, layer after layer."""

    def attend(self, question: Question) -> Tensor:
        """[1, T, num_q_heads, head_dim]."""
        ...


_answers: ContextVar[Answers] = ContextVar("answers")


@contextmanager
def answering(answers: Answers) -> Iterator[None]:
    """For the forward passes of this thread within the block, attention is what `answers` says."""
    token = _answers.set(answers)
    try:
        yield
    finally:
        _answers.reset(token)


def import_transformers() -> ModuleType:
    """transformers, with kvferry's attention registered. Raises KvferryError when it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise unusable(
            "models that are not native run through the package transformers: pip install 'kvferry[fallback]'"
        ) from error
    transformers.AttentionInterface.register(ATTENTION_NAME, _attention)
    return transformers


@contextmanager
def quiet() -> Iterator[None]:
    """transformers warns of much that is of no concern here, and draws progress bars; what matters is checked and
    raised. Only where `import_transformers` was called before."""
    from transformers.utils import logging as untyped

    logging: Any = untyped
    verbosity, draws = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if draws:
            logging.enable_progress_bar()


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """In the form in which transformers calls it (see its documentation of AttentionInterface)."""
    scale = options.get("scaling")
    layer = LayerAttention(
        scale=float(query.shape[-1] ** -0.5 if scale is None else scale),
        window=options.get("sliding_window"),
        soft_cap=options.get("softcap"),
    )
    question = Question(query, key, value, layer, _beyond(module, attention_mask, options))
    return _answers.get().attend(question), None


def _beyond(module: nn.Module, attention_mask: Tensor | None, options: dict[str, Any]) -> str | None:
    if attention_mask is not None:
        return "a mask of its own"
    if options.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        return "attention to later tokens"
    for name in ("s_aux", "position_bias", "head_mask"):
        if options.get(name) is not None:
            return f"attention with {name}"
    return None
