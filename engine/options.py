"""The engine's part of a worker's configuration."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.cpu_placement import parse_cpus
from runtime.config import flag, required_flag

DEFAULT_CACHE_DIR = Path("~/.cache/kvferry")

DEFAULT_POOL_BYTES = 2 * 1024**3

_DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Flags that size an engine."""

    model: str = required_flag("Model directory, .gguf file, prepared directory or known alias.")
    cache_dir: Path = flag(DEFAULT_CACHE_DIR, "Where prepared models are kept.")
    weight_dtype: Literal["", "fp32", "bf16", "fp16", "int8"] = flag(
        "", "How weights are stored; computed is in fp32. Empty takes fp32, or what a prepared directory has."
    )
    kv_cache_dtype: Literal["fp32", "bf16", "fp16", "int8", "fp8_e4m3"] = flag("fp32", "Element type of the KV pool.")
    block_size: int = flag(16, "Tokens a KV block; a power of two from 8 to 128.", unit="tokens")
    num_blocks: int = flag(
        0, "Blocks in the KV pool; 0 takes a quarter of the free memory, 2 GiB at most.", unit="blocks"
    )
    token_budget: int = flag(256, "Most tokens that one step computes.", unit="tokens")
    max_num_seqs: int = flag(64, "Most sequences that one step computes.", unit="sequences")
    max_waiting: int = flag(256, "Most sequences that wait; more are refused.", unit="sequences")
    speculative_tokens: int = flag(
        0, "Most tokens that a decoding sequence guesses ahead in a step, from its own text; 0 = none."
    )
    max_context_tokens: int = flag(0, "Longest prompt plus output; 0 takes the model's limit.")
    device: str = flag("cpu", "Where the model and its KV pool are: cpu, cuda or cuda:N.")
    tensor_parallel: int = flag(1, "Processes that the model is split over; each holds its share of the weights.")
    threads: int = flag(1, "Compute threads of each process. More than there are idle cores do not help.")
    pin_cpus: str = flag("", "CPUs that the process may run on, such as 0-3,6; empty means all.")

    def validate(self) -> None:
        """Raises ValueError naming the flag."""
        if self.block_size not in (8, 16, 32, 64, 128):
            raise ValueError("--block-size must be a power of two from 8 to 128")
        if self.num_blocks < 0 or self.max_context_tokens < 0:
            raise ValueError("--num-blocks and --max-context-tokens must not be negative")
        if self.max_num_seqs < 1 or self.max_waiting < 1:
            raise ValueError("--max-num-seqs and --max-waiting must be at least 1")
        if not 1 <= self.tensor_parallel <= 64:
            raise ValueError("--tensor-parallel must be 1 to 64")
        if not _DEVICE.fullmatch(self.device):
            raise ValueError(f"--device must be cpu, cuda or cuda:N, not {self.device}")
        if self.device != "cpu" and self.tensor_parallel > 1:
            raise ValueError("--tensor-parallel works with --device cpu only: its ranks share one pool in host memory")
        if not 1 <= self.threads <= 256:
            raise ValueError("--threads must be 1 to 256")
        if self.pin_cpus:
            parse_cpus(self.pin_cpus)
        if not 0 <= self.speculative_tokens <= 64:
            raise ValueError("--speculative-tokens must be 0 to 64")
        if self.token_budget < self.max_num_seqs:
            raise ValueError("--token-budget must be at least --max-num-seqs: each running sequence takes a token")
