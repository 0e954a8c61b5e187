"""kvferry's engine alone in a process: no router, no worker, no hand-off. Run by kvferry's own interpreter."""

import mmap
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from bench.peers.protocol import Generated, LoadedEngine, Setup, serve
from runtime.collector import loading

with loading():  # As the workers do.
    from engine.build import build_engine, plan_engine
    from engine.options import EngineOptions
    from engine.sequence import SamplingParams, Sequence
    from kvferry import __version__


class KvferryEngine:
    """Steps an engine until all sequences have ended. One thread."""

    def __init__(self, setup: Setup) -> None:
        block_size = EngineOptions.block_size
        options = EngineOptions(
            model=setup.model,
            # A block of each sequence is not full, and one more is kept free for its growth.
            num_blocks=-(-setup.pool_tokens // block_size) + 2 * setup.max_seqs,
            max_num_seqs=setup.max_seqs,
            max_context_tokens=setup.max_context,
            threads=setup.threads,
        )
        options.validate()
        plan = plan_engine(options, available_bytes=None)
        self.version = __version__
        self._pool = mmap.mmap(-1, plan.pool_bytes)
        self._engine = build_engine(options, plan, memoryview(self._pool), prefill_only=False)
        self._max_context = plan.limits.max_context_tokens
        self._count = 0

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[Generated]:
        """See LoadedEngine."""
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        generated: dict[str, Generated] = {}
        for prompt in prompts:
            self._count += 1
            seq = Sequence(str(self._count), prompt, sampling, max_context_tokens=self._max_context)
            self._engine.add(seq)
            generated[seq.seq_id] = []
        while self._engine.has_work:
            schedule = self._engine.schedule()
            outputs = self._engine.publish(schedule, self._engine.run(schedule))
            now = time.perf_counter()
            for output in outputs:
                if output.error is not None:
                    raise output.error
                generated[output.seq.seq_id] += [(sample.token_id, now) for sample in output.samples]
        return list(generated.values())


def load(setup: Setup) -> LoadedEngine:
    """A loaded engine."""
    return KvferryEngine(setup)


if __name__ == "__main__":
    serve(load)
