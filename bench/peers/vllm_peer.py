"""vLLM's CPU build. Imports nothing of kvferry."""

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

from bench.peers.protocol import Generated, LoadedEngine, Setup, serve

_BLOCK_TOKENS = 128
_MEMORY_SHARE = 0.4


class VllmEngine:
    """vLLM's engine, stepped in this process."""

    def __init__(self, setup: Setup) -> None:
        cpus = sorted(os.sched_getaffinity(0))[: setup.threads]
        # It takes these from the environment alone.
        os.environ["VLLM_TARGET_DEVICE"] = "cpu"
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cpus))
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        vllm: Any = importlib.import_module("vllm")
        self.version = str(vllm.__version__)
        self._vllm = vllm
        self._engine = vllm.LLM(
            setup.model,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=setup.max_context,
            max_num_seqs=setup.max_seqs,
            # It wants this share of the memory to be free, though the pool's size is given below.
            gpu_memory_utilization=_MEMORY_SHARE,
            block_size=_BLOCK_TOKENS,
            num_gpu_blocks_override=-(-setup.pool_tokens // _BLOCK_TOKENS) + setup.max_seqs,
        ).llm_engine
        self._count = 0

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[Generated]:
        """See LoadedEngine."""
        generated: dict[str, Generated] = {}
        for prompt in prompts:
            self._count += 1
            sampling = self._vllm.SamplingParams(
                temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
            )
            self._engine.add_request(str(self._count), {"prompt_token_ids": prompt}, sampling)
            generated[str(self._count)] = []
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now = time.perf_counter()
            for output in outputs:
                into = generated[output.request_id]
                into += [(token, now) for token in output.outputs[0].token_ids[len(into) :]]
        return list(generated.values())


def load(setup: Setup) -> LoadedEngine:
    """A loaded engine."""
    return VllmEngine(setup)


if __name__ == "__main__":
    serve(load)
