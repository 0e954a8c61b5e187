"""The engine's part of a worker's configuration."""

from dataclasses import dataclass
from pathlib import Path

from runtime.config import flag, required_flag

DEFAULT_CACHE_DIR = Path("~/.cache/kvferry")

DEFAULT_POOL_BYTES = 2 * 1024**3


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Flags that size an engine."""

    model: str = required_flag("Model directory, .gguf file, prepared directory or known alias.")
    cache_dir: Path = flag(DEFAULT_CACHE_DIR, "Where prepared models are kept.")
    block_size: int = flag(16, "Tokens a KV block; a power of two from 8 to 128.")
    num_blocks: int = flag(0, "Blocks in the KV pool; 0 takes a quarter of the free memory, 2 GiB at most.")
    token_budget: int = flag(256, "Most tokens that one step computes.")
    max_num_seqs: int = flag(64, "Most sequences that one step computes.")
    max_waiting: int = flag(256, "Most sequences that wait; more are refused.")
    max_context_tokens: int = flag(0, "Longest prompt plus output; 0 takes the model's limit.")

    def validate(self) -> None:
        """Raises ValueError naming the flag."""
        if self.block_size not in (8, 16, 32, 64, 128):
            raise ValueError("--block-size must be a power of two from 8 to 128")
        if self.num_blocks < 0 or self.max_context_tokens < 0:
            raise ValueError("--num-blocks and --max-context-tokens must not be negative")
        if self.max_num_seqs < 1 or self.max_waiting < 1:
            raise ValueError("--max-num-seqs and --max-waiting must be at least 1")
        if self.token_budget < self.max_num_seqs:
            raise ValueError("--token-budget must be at least --max-num-seqs: each running sequence takes a token")
