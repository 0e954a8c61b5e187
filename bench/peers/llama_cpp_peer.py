"""llama.cpp's server engine, by way of `xllamacpp` (its C++ server in this process). Imports nothing of kvferry.

The GGUF file names its tokens "t0;", "t1;", ... (see bench/common/exported_model.py), so the text is the token ids.
"""

import importlib
import importlib.metadata
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

from bench.peers.protocol import Generated, LoadedEngine, Setup, serve

_CELL_TOKENS = 256  # llama.cpp rounds contexts up to this.


class LlamaCppEngine:
    """A server with a slot for each request; a thread for each request waits for its tokens."""

    def __init__(self, setup: Setup) -> None:
        xllamacpp: Any = importlib.import_module("xllamacpp")
        params = xllamacpp.CommonParams()
        params.model.path = setup.model
        params.n_parallel = setup.max_seqs
        # One cache for all slots, or each would have its share of it only.
        params.kv_unified = True
        params.n_ctx = -(-setup.pool_tokens // _CELL_TOKENS) * _CELL_TOKENS
        params.cache_type_k = xllamacpp.ggml_type.GGML_TYPE_F32
        params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.cpuparams.n_threads = setup.threads
        params.cpuparams_batch.n_threads = setup.threads
        # Copies of prompts in other memory would only cost time: what repeats here is still in its slot.
        params.cache_ram_mib = 0
        self.version = importlib.metadata.version("xllamacpp")
        self._server = xllamacpp.Server(params)

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[Generated]:
        """See LoadedEngine."""
        generated: list[Generated] = [[] for _ in prompts]
        errors: list[str] = []
        requests = [
            threading.Thread(target=self._request, args=(prompt, max_tokens, into, errors))
            for prompt, into in zip(prompts, generated, strict=True)
        ]
        for request in requests:
            request.start()
        for request in requests:
            request.join()
        if errors:
            raise RuntimeError(errors[0])
        return generated

    def _request(self, prompt: list[int], max_tokens: int, into: Generated, errors: list[str]) -> None:
        def on_chunk(chunk: Any) -> bool:
            if "choices" not in chunk:
                errors.append(str(chunk))
                return True
            now = time.perf_counter()
            into.extend((int(name[1:]), now) for name in chunk["choices"][0]["text"].split(";") if name)
            return False

        body = {"prompt": prompt, "n_predict": max_tokens, "temperature": 0.0, "ignore_eos": True, "stream": True}
        try:
            self._server.handle_completions(body, on_chunk)
        except Exception as error:  # Of this thread; told by the one that waits.
            errors.append(str(error))


def load(setup: Setup) -> LoadedEngine:
    """A loaded engine."""
    return LlamaCppEngine(setup)


if __name__ == "__main__":
    serve(load)
