"""xgrammar behind three calls: load, compile, match. The only module that imports it, and only when it is needed:
importing takes a second and memory that a worker without structured output need not spend.
"""

import re
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from engine.vocabulary import Vocabulary
from kvferry_rpc.common_pb2 import Grammar
from runtime.errors import invalid
from runtime.grammar_limits import grammar_field

if TYPE_CHECKING:
    import xgrammar

# Models, small ones above all, can go on with blanks and never come to the next value.
_MAX_BLANKS: Final = 16
_ANY_OBJECT: Final = '{"type":"object"}'
_LOG_PREFIX: Final = re.compile(r"\[[0-9:]+\] \S+:\d+: ")


def is_installed() -> bool:
    """Whether there is an xgrammar to import."""
    return find_spec("xgrammar") is not None


def is_json(kind: "Grammar.Kind.ValueType") -> bool:
    """Whether answers of this kind are JSON."""
    return kind in (Grammar.JSON_SCHEMA, Grammar.JSON_OBJECT)


class GrammarBackend:
    """Compiles grammars for one vocabulary. Any thread, one call at a time; `match` any number."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Imports xgrammar. Raises ImportError when it is not installed: ask `is_installed` before."""
        import xgrammar

        self._xgrammar = xgrammar
        self._vocabulary = vocabulary
        # By whether it is for JSON; made when first needed.
        self._compilers: dict[bool, xgrammar.GrammarCompiler] = {}

    @property
    def tokens(self) -> tuple[bytes, ...]:
        """The bytes of each token id; b"" for what no grammar allows."""
        return self._vocabulary.tokens

    @property
    def vocab_size(self) -> int:
        """Token ids, those without a token included."""
        return len(self._vocabulary.tokens)

    def compile(self, grammar: Grammar) -> "xgrammar.CompiledGrammar":
        """Compile a grammar that passed `runtime.grammar_limits.check_grammar`.

        Nothing bounds the time and memory that this takes, nor a crash: see `engine.grammar_trial`. Raises KvferryError
        (INVALID_REQUEST) naming the field for a grammar that is wrong or uses what xgrammar lacks.
        """
        compiler = self._compiler(is_json(grammar.kind))
        try:
            if grammar.kind == Grammar.REGEX:
                return compiler.compile_regex(grammar.text)
            if grammar.kind == Grammar.EBNF:
                return compiler.compile_grammar(grammar.text)
            schema = grammar.text if grammar.kind == Grammar.JSON_SCHEMA else _ANY_OBJECT
            return compiler.compile_json_schema(schema, max_whitespace_cnt=_MAX_BLANKS)
        except MemoryError:
            raise invalid(grammar_field(grammar), "is too large to be compiled") from None
        except (RuntimeError, ValueError, TypeError) as error:
            problem = _LOG_PREFIX.sub("", str(error)).strip()
            raise invalid(grammar_field(grammar), f"cannot be compiled: {problem[:400]}") from None

    def matcher(self, compiled: "xgrammar.CompiledGrammar") -> "xgrammar.GrammarMatcher":
        """A matcher at the start of a text. Cheap."""
        return self._xgrammar.GrammarMatcher(compiled)

    def new_mask(self) -> NDArray[np.int32]:
        """A mask as matchers fill it, [1, ceil(vocab_size / 32)]: bit i of word w is token 32 w + i."""
        return np.zeros((1, (self.vocab_size + 31) // 32), dtype=np.int32)

    def _compiler(self, for_json: bool) -> "xgrammar.GrammarCompiler":
        if for_json not in self._compilers:
            vocabulary = self._vocabulary.for_json() if for_json else self._vocabulary
            info = self._xgrammar.TokenizerInfo(
                list(vocabulary.tokens),
                self._xgrammar.VocabType.RAW,
                vocab_size=self.vocab_size,
                stop_token_ids=sorted(vocabulary.eos_token_ids),
            )
            # One thread, as all of a worker's; results are kept by `engine.grammar`, which counts their bytes.
            self._compilers[for_json] = self._xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        return self._compilers[for_json]
