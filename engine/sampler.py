"""From logits to the next token of each row.

The steps of one row, in this order:

1. `logit_bias` is added.
2. Below `min_tokens`, stop tokens are impossible, and so are end-of-text tokens unless `ignore_eos` makes them
   ordinary ones. Then the grammar: tokens outside `SampleRow.allowed` are impossible, end-of-text among them until
   the grammar is complete. What follows works on what is left.
3. Repetition penalty, as in transformers: each token seen in prompt or output has its logit divided by the penalty
   when it is positive and multiplied by it when not, once however often it was seen. Then `presence_penalty` is
   subtracted from each token of the output, and `frequency_penalty` once per occurrence there.
4. Temperature 0 ends here: the most likely token, the lowest id among equals.
5. Otherwise logits are divided by the temperature, then filtered, each filter working on what the one before kept:
   top-k keeps the k most likely tokens and every token tied with the last of them (as transformers and vLLM do);
   top-p keeps the smallest set of most likely tokens whose probabilities, renormalised over what top-k kept, reach
   `top_p`: the token that crosses the threshold stays, and among equals lower ids go first;
   min-p keeps tokens at least `min_p` times as likely as the most likely one.
6. Gumbel-max: the argmax of logit + noise(seed, position, token id) over the tokens kept.

Log probabilities are of the raw model distribution, before all of this.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.noise import gumbel
from engine.sequence import SamplingParams, TokenSample
from kvferry_rpc.common_pb2 import ErrorCode
from runtime.errors import KvferryError, invalid

MIN_LOGPROB: Final = -9999.0  # stands for the logarithm of 0, which JSON cannot carry
_NUCLEUS_HEAD: Final = 1024  # most nuclei are smaller; only wider ones pay for a full sort

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What one row of logits is sampled with.

    `position` is the index of the token being chosen in the whole sequence (prompt and output). `output_token_ids`
    holds all generated tokens, earlier attempts included. Neither list is changed or kept. `allowed`: a bit for each
    token that may come next, lowest bit first, uint32 [at least ceil(vocab / 32)], not changed; None = every token.
    """

    sampling: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    position: int
    eos_token_ids: frozenset[int] = frozenset()
    allowed: NDArray[np.uint32] | None = None


class Sampler:
    """Chooses one token a row. Holds nothing but a table of token ids; any one thread at a time."""

    def __init__(self) -> None:
        self._token_ids: NDArray[np.uint32] = np.arange(0, dtype=np.uint32)

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[TokenSample | KvferryError]:
        """Sample row i of `logits` (fp32 [R, vocab], not changed) with `rows[i]`.

        A row's result depends on that row alone, never on its neighbours. A row that cannot be sampled gives a
        KvferryError *in the list, in its place*, and harms no other row: INTERNAL when its logits hold a NaN or
        +inf, or when they or `allowed` leave no token possible; INVALID_REQUEST when a token id is outside the
        vocabulary.
        Raises ValueError when shapes or dtype do not fit (a defect of the caller).
        """
        if logits.ndim != 2 or logits.shape[0] != len(rows):
            raise ValueError(f"logits {tuple(logits.shape)} do not fit {len(rows)} rows")
        if not rows:
            return []
        values = logits.detach().cpu().numpy()
        if values.dtype != np.float32:
            raise ValueError(f"logits must be fp32, not {values.dtype}")
        if len(self._token_ids) != values.shape[1]:
            self._token_ids = np.arange(values.shape[1], dtype=np.uint32)
        # numpy's argmax gives the first of equals, and the first NaN where there is one.
        best = values.argmax(axis=1)
        results: list[TokenSample | KvferryError] = []
        with np.errstate(over="ignore", invalid="ignore"):
            for raw, row, raw_best in zip(values, rows, best.tolist(), strict=True):
                try:
                    results.append(self._sample_row(raw, row, raw_best))
                except KvferryError as error:
                    results.append(error)
        return results

    def _sample_row(self, raw: Floats, row: SampleRow, raw_best: int) -> TokenSample:
        _check_peak(raw[raw_best])
        sampling = row.sampling
        scores, best = raw, raw_best
        if changes_logits(row):
            scores = adjust_logits(raw, row)
            best = int(scores.argmax())
            _check_peak(scores[best], constrained=row.allowed is not None)
        token_id = best if sampling.temperature == 0.0 else self._draw(scores, row)
        if sampling.num_logprobs is None:
            return TokenSample(token_id)
        return TokenSample(token_id, *logprobs_of(raw, token_id, sampling.num_logprobs))

    def _draw(self, scores: Floats, row: SampleRow) -> int:
        kept, scaled = filter_tokens(scores, row.sampling)
        token_ids = self._token_ids if kept is None else self._token_ids[kept]
        scaled += gumbel(row.sampling.seed, row.position, token_ids)
        return int(token_ids[scaled.argmax()])


def adjust_logits(raw: Floats, row: SampleRow) -> Floats:
    """Steps 1 to 3: bias, minimum length, grammar, penalties. `raw` [vocab] is not changed; a fresh array is returned.

    Raises KvferryError (INVALID_REQUEST) for a token id outside the vocabulary.
    """
    sampling = row.sampling
    scores = raw.copy()
    if sampling.logit_bias:
        ids, biases = zip(*sampling.logit_bias, strict=True)
        scores[_index("logit_bias", ids, len(scores))] += np.array(biases, dtype=np.float32)
    banned = _banned_tokens(row)
    if banned:
        scores[_index("stop_token_ids", tuple(banned), len(scores))] = -np.inf
    if row.allowed is not None:
        bits = np.unpackbits(row.allowed.view(np.uint8), count=len(scores), bitorder="little")
        scores[bits == 0] = -np.inf
    if sampling.repetition_penalty != 1.0:
        # A token seen twice is written twice with the same value, so there is no need to sort out repeats.
        seen = _index("prompt", (*row.prompt_token_ids, *row.output_token_ids), len(scores))
        old = scores[seen]
        scores[seen] = np.where(old > 0, old / sampling.repetition_penalty, old * sampling.repetition_penalty)
    if row.output_token_ids and (sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0):
        output, counts = np.unique(_index("prompt", row.output_token_ids, len(scores)), return_counts=True)
        scores[output] -= sampling.presence_penalty + sampling.frequency_penalty * counts.astype(np.float32)
    return scores


def filter_tokens(scores: Floats, sampling: SamplingParams) -> tuple[NDArray[np.intp] | None, NDArray[np.float64]]:
    """Step 5 for finite-peaked `scores` [vocab] and a temperature above 0.

    Returns (token ids kept, ascending, or None for all; their logits divided by the temperature, shifted so that
    the largest is 0, float64).
    """
    kept: NDArray[np.intp] | None = None
    values = scores
    vocab_size = len(scores)
    if 0 < sampling.top_k < vocab_size:
        cut = vocab_size - sampling.top_k
        kept = np.flatnonzero(scores >= np.partition(scores, cut)[cut])
        values = scores[kept]
    # Shifting by the peak before dividing keeps a tiny temperature from overflowing to inf - inf.
    scaled = values.astype(np.float64)
    scaled -= scaled.max()
    scaled /= sampling.temperature
    if sampling.top_p >= 1.0 and sampling.min_p <= 0.0:
        return kept, scaled
    weights = np.exp(scaled)
    mask = weights >= sampling.min_p  # the largest weight is exactly 1
    if sampling.top_p < 1.0:
        mask &= nucleus_mask(weights, sampling.top_p)
    inside = np.flatnonzero(mask)
    return inside if kept is None else kept[inside], scaled[inside]


def nucleus_mask(weights: NDArray[np.float64], top_p: float) -> NDArray[np.bool_]:
    """Which of `weights` [n] (probabilities times any constant) are in the smallest set that holds the share `top_p`.

    Ties at the border are broken towards lower indices. At least one is always in.
    """
    target = top_p * weights.sum()
    head = _sorted_head(weights, _NUCLEUS_HEAD)
    cumulative = head.cumsum()
    if cumulative[-1] < target:
        head = _sorted_head(weights, len(weights))
        cumulative = head.cumsum()
    # Rounding may leave the sum of everything a hair below a target close to it, hence the minimum.
    count = min(int(np.searchsorted(cumulative, target)) + 1, len(head))
    border = head[count - 1]
    mask: NDArray[np.bool_] = weights > border
    ties = np.flatnonzero(weights == border)
    mask[ties[: count - int(mask.sum())]] = True
    return mask


def _sorted_head(weights: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """The `size` largest weights in descending order."""
    if size < len(weights):
        cut = len(weights) - size
        weights = np.partition(weights, cut)[cut:]
    return np.sort(weights)[::-1]


def changes_logits(row: SampleRow) -> bool:
    """Whether steps 1 to 3 do anything to the row."""
    sampling = row.sampling
    return bool(
        row.allowed is not None
        or sampling.logit_bias
        or sampling.repetition_penalty != 1.0
        or ((sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0) and row.output_token_ids)
        or len(row.output_token_ids) < sampling.min_tokens
    )


def _banned_tokens(row: SampleRow) -> frozenset[int]:
    if len(row.output_token_ids) >= row.sampling.min_tokens:
        return frozenset()
    eos = frozenset[int]() if row.sampling.ignore_eos else row.eos_token_ids
    return row.sampling.stop_token_ids | eos


def _index(field: str, token_ids: Sequence[int], vocab_size: int) -> NDArray[np.int64]:
    """`token_ids` as an index array. A negative id would silently count from the end, so both ends are checked."""
    index = np.array(token_ids, dtype=np.int64)
    if len(index) and (index.min() < 0 or index.max() >= vocab_size):
        raise invalid(field, f"has a token id outside the vocabulary of {vocab_size}")
    return index


def _check_peak(peak: np.float32, *, constrained: bool = False) -> None:
    """The largest logit tells all: it is NaN if any is, +inf if any is, and -inf only if all are."""
    if not np.isfinite(peak):
        reason = "its grammar leaves none" if constrained else f"the largest logit is {peak}"
        raise KvferryError(ErrorCode.INTERNAL, f"no token can be sampled: {reason}")


def logprobs_of(raw: Floats, token_id: int, num_logprobs: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """The log probability of `token_id` under logits `raw` [vocab]; the `num_logprobs` most likely tokens, with theirs.

    Raises KvferryError (INTERNAL) when the logits hold a NaN or +inf.
    """
    peak = raw.max()
    _check_peak(peak)
    shifted = raw - peak
    log_total = float(np.log(np.exp(shifted).sum(dtype=np.float64)))

    def logprob(token: int) -> float:
        return min(0.0, max(float(shifted[token]) - log_total, MIN_LOGPROB))

    top = _top_tokens(raw, min(num_logprobs, len(raw)))
    return logprob(token_id), tuple((token, logprob(token)) for token in top)


def _top_tokens(raw: Floats, count: int) -> list[int]:
    """Ids of the `count` largest logits, largest first, lower ids first among equals."""
    if count == 0:
        return []
    cut = len(raw) - count
    border = np.partition(raw, cut)[cut]
    above = np.flatnonzero(raw > border)
    ids = np.concatenate([above, np.flatnonzero(raw == border)[: count - len(above)]])
    order: list[int] = ids[np.argsort(-raw[ids], kind="stable")].tolist()
    return order
