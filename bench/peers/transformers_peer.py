"""transformers' continuous batching. Imports nothing of kvferry."""

import importlib
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

from bench.peers.protocol import Generated, LoadedEngine, Setup, serve

_PAGE_TOKENS = 32
_RESULT_S = 1.0


class TransformersEngine:
    """A manager with a generation thread of its own; tokens are taken as they come."""

    def __init__(self, setup: Setup) -> None:
        torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
        torch.set_num_threads(setup.threads)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            setup.model, dtype=torch.float32, attn_implementation="sdpa"
        )
        config = transformers.ContinuousBatchingConfig(
            page_size=_PAGE_TOKENS,
            num_blocks=-(-setup.pool_tokens // _PAGE_TOKENS) + setup.max_seqs,
            max_requests_per_batch=setup.max_seqs,
        )
        greedy = transformers.GenerationConfig(do_sample=False, eos_token_id=-1)
        self.version = str(transformers.__version__)
        self._manager = model.init_continuous_batching(greedy, config)
        with torch.inference_mode():
            self._manager.start()

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[Generated]:
        """See LoadedEngine."""
        generated: dict[str, Generated] = {
            self._manager.add_request(prompt, max_new_tokens=max_tokens, streaming=True): [] for prompt in prompts
        }
        num_left = len(prompts)
        while num_left:
            result = self._manager.get_result(timeout=_RESULT_S)
            if result is None:
                if not self._manager.is_running():
                    raise RuntimeError(f"stopped: {self._manager.background_thread_status.fatal_error}")
                continue
            if result.error is not None:
                raise RuntimeError(result.error)
            into, now = generated[result.request_id], time.perf_counter()
            into += [(token, now) for token in result.generated_tokens[len(into) :]]
            num_left -= result.is_finished()
        return list(generated.values())


def load(setup: Setup) -> LoadedEngine:
    """A loaded engine."""
    return TransformersEngine(setup)


if __name__ == "__main__":
    serve(load)
