"""Tokenizers small enough for tests: the committed byte-level one, and a SentencePiece-like one made here."""

import json
from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, processors

from router.text.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data"
TINY_REAL = DATA / "tiny-real"


@cache
def tiny_real() -> Tokenizer:
    """Byte-level, 4,032 entries, with a chat template."""
    return Tokenizer.load(TINY_REAL)


@cache
def short_prompts() -> tuple[str, ...]:
    """66 prompts in 23 scripts, with emoji, right-to-left text and code."""
    # Not splitlines(): the prompts hold line separators of several scripts.
    lines = (DATA / "prompts_short.jsonl").read_text(encoding="utf-8").split("\n")
    return tuple(json.loads(line)["text"] for line in lines if line)


def sentencepiece_backend(*, strip: bool = True) -> tokenizers.Tokenizer:
    """As Llama 2's: marks for spaces, byte tokens for what the vocabulary lacks, a first space that is removed."""
    words = ["▁", "▁the", "▁a", "▁▁", "é", "日本", "s", "t", "e", "x", "▁text", ".", "字"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {name: index for index, name in enumerate(names)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        steps.append(decoders.Strip(" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


@cache
def sentencepiece(strip: bool = True) -> Tokenizer:
    """272 entries; ids 3 to 258 are the byte tokens."""
    return Tokenizer(sentencepiece_backend(strip=strip))


def write_sentencepiece_model(directory: Path) -> Path:
    """A model directory whose tokenizer puts `<s>` before every text."""
    sentencepiece_backend().save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory
