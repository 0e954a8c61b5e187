"""What a prefill and a decode worker together said, held against transformers."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from kvferry_rpc.common_pb2 import SamplingParams
from tests.support.worker_pair import Outcome

TOLERANCE = 1e-4
TOKENS = [int(token) for token in torch.randint(3, 96, (60,), generator=torch.Generator().manual_seed(4))]


def greedy(max_tokens: int = 10) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, num_logprobs=0)


def largest_difference(model: PreTrainedModel, prompt: Sequence[int], outcome: Outcome) -> float:
    """The most by which a log probability of the answer differs from what transformers says of the same tokens."""
    answer = outcome.token_ids
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
    return float((expected - torch.tensor([token.logprob for token in outcome.tokens])).abs().max())
