"""A whole engine whose model is split over processes, this one being rank 0. Run as a module, it says which processes
and waits to be told anything, or killed."""

import json
import sys
from pathlib import Path

from engine.build import EnginePlan, build_engine, plan_engine, start_followers
from engine.engine import Engine, SequenceOutput
from engine.model_runner import LayerHook
from engine.options import EngineOptions
from engine.parallel.leader import Followers
from engine.scheduler import Schedule
from engine.sequence import SamplingParams, Sequence
from kv_transfer.region import MemoryRegion


class SplitEngine:
    """Whoever makes it closes it."""

    def __init__(self, model: Path, cache_dir: Path, ranks: int) -> None:
        self.options = EngineOptions(
            model=str(model), cache_dir=cache_dir, num_blocks=64, token_budget=40, max_num_seqs=8, tensor_parallel=ranks
        )
        self.plan: EnginePlan = plan_engine(self.options, available_bytes=None)
        self.pool = MemoryRegion.allocate(self.plan.pool_bytes, shared=True)
        self.followers: Followers | None = start_followers(self.options, self.plan, self.pool.file)
        self.engine: Engine = build_engine(
            self.options, self.plan, self.pool.buffer, prefill_only=False, followers=self.followers
        )

        self._schedule: Schedule

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the other ranks."""
        return self.followers.pids if self.followers else ()

    def generate(self, prompts: list[list[int]], max_tokens: int, on_layer: LayerHook | None = None) -> list[list[int]]:
        """Greedy, all at once."""
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        seqs = [Sequence(str(i), prompt, sampling, max_context_tokens=400) for i, prompt in enumerate(prompts)]
        for seq in seqs:
            self.engine.add(seq)
        while self.engine.has_work:
            self._step(on_layer)
        return [seq.output_token_ids for seq in seqs]

    def score(self, prompt: list[int]) -> list[float]:
        """Log probabilities of a prompt, its first token left out."""
        sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        self.engine.add(Sequence("scored", prompt, sampling, max_context_tokens=400))
        found: list[float] = []
        while self.engine.has_work:
            found += [token.logprob for output in self._step() for token in output.prompt_logprobs]
        return found

    def _step(self, on_layer: LayerHook | None = None) -> list[SequenceOutput]:
        self._schedule = self.engine.schedule()
        return self.engine.publish(self._schedule, self.engine.run(self._schedule, on_layer))

    def run_again(self) -> None:
        """Run the step that failed once more."""
        self.engine.run(self._schedule)

    def close(self) -> None:
        if self.followers is not None:
            self.followers.close(10.0)
        self.pool.close()


def main() -> None:
    split = SplitEngine(Path(sys.argv[1]), Path(sys.argv[2]), 2)
    sys.stdout.write(json.dumps({"pids": split.pids}) + "\n")
    sys.stdout.flush()
    sys.stdin.readline()


if __name__ == "__main__":
    main()
