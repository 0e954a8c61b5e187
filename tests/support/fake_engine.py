"""An engine for the benchmark's protocol that computes sums. Run as a program: `fake_engine.py [OFFSET]`.

OFFSET is added to every token, so that its texts differ; "broken" cannot load, "dying" ends at the first prompt.
"""

import sys
import threading
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from bench.peers.protocol import Generated, LoadedEngine, Setup, serve


class FakeEngine:
    """Token number n of a prompt is the sum of the prompt plus n plus the offset."""

    version = "0.1-fake"

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[Generated]:
        """See LoadedEngine. The tokens of a step come at one time, a microsecond or more after the last."""
        if self._kind == "dying":
            sys.stderr.write("out of luck\n")
            sys.stderr.flush()
            sys.exit(3)
        offset = int(self._kind)
        generated: list[Generated] = [[] for _ in prompts]
        for step in range(max_tokens):
            time.sleep(1e-4)
            now = time.perf_counter()
            for prompt, into in zip(prompts, generated, strict=True):
                into.append((sum(prompt) + step + offset, now))
        return generated


def load(setup: Setup) -> LoadedEngine:
    """A loaded engine, unless it is a broken one. Writes to stdout and leaves a thread behind, as libraries do."""
    sys.__stdout__.write(f"loading {setup.model} with {setup.threads} threads\n")
    kind = sys.argv[1] if len(sys.argv) > 1 else "0"
    if kind == "broken":
        raise RuntimeError("no such architecture")
    if kind != "dying":
        threading.Thread(target=threading.Event().wait).start()
    return FakeEngine(kind)


if __name__ == "__main__":
    serve(load)
