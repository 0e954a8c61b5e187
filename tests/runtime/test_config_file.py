"""Options from YAML files, and what is said about those that are no good."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.config import config_flags, config_yaml, flag, parse_config, required_flag
from runtime.config_file import MAX_FILE_BYTES, ConfigFileError, Section, read_config_file
from runtime.config_options import Option, options_of, unit_of
from runtime.config_text import as_yaml


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample process."""

    model: Path = required_flag("Directory of the model.")
    http_port: int = flag(8000, "Port.")
    wait_s: float = flag(0.5, "A wait.")
    log_json: bool = flag(False, "JSON logs.")
    transports: tuple[str, ...] = flag(("shm", "tcp"), "Transports.")
    sizes: tuple[int, ...] = flag((), "Sizes.", unit="tokens")
    log_level: Literal["info", "debug"] = flag("info", "Level.")
    name: str = flag("", "Name.")
    secret_file: Path | None = flag(None, "Secret.")
    limit: int | None = flag(7, "Limit.")

    def validate(self) -> None:
        if not 0 <= self.http_port < 65536:
            raise ValueError(f"--http-port must be a port, not {self.http_port}")


TOP = Section(options_of(Sample))


def _read(tmp_path: Path, text: str | bytes, **sections: Section) -> dict[str, Any]:
    path = tmp_path / "c.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_config_file(path, TOP, sections)


def _said(tmp_path: Path, text: str | bytes, **sections: Section) -> str:
    with pytest.raises(ConfigFileError) as caught:
        _read(tmp_path, text, **sections)
    return str(caught.value).removeprefix(str(tmp_path / "c.yaml"))


def test_every_type_is_read(tmp_path: Path) -> None:
    text = """
        # a comment
        model: /m
        http_port: 1
        wait_s: 2
        log_json: true
        transports: [tcp]
        sizes:
        - 8
        - 16
        log_level: debug
        name: "1:30"
        secret_file: ~
        limit: null
    """
    assert _read(tmp_path, text.replace("\n        ", "\n")) == {
        "model": Path("/m"), "http_port": 1, "wait_s": 2.0, "log_json": True, "transports": ("tcp",),
        "sizes": (8, 16), "log_level": "debug", "name": "1:30", "secret_file": None, "limit": None,
    }  # fmt: skip


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_a_file_may_say_nothing(text: str, tmp_path: Path) -> None:
    assert _read(tmp_path, text) == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("http_prot: 1", ", line 1: there is no key 'http_prot'; did you mean http_port?"),
        ("\nhttp-port: 1", ", line 2: there is no key 'http-port'; did you mean http_port?"),
        ("secret: hunter2", ", line 1: there is no key 'secret'; did you mean secret_file?"),
        ("zzz: 1", ", line 1: there is no key 'zzz'"),
        ("name: a\nname: b", ", line 2: name: is there twice"),
        ("8: a", ", line 1: a key must be text, not a whole number"),
        ("[a]: 1", ", line 1: a key must be text, not a list"),
        ("http_port: many", ", line 1: http_port: must be a whole number, not text"),
        ("http_port: 1.0", ", line 1: http_port: must be a whole number, not a number"),
        ("http_port: true", ", line 1: http_port: must be a whole number, not true or false"),
        ("http_port: '1'", ", line 1: http_port: must be a whole number, not text"),
        ("http_port:", ", line 1: http_port: must be a whole number, not nothing"),
        ("http_port: 010", ", line 1: http_port: must be a whole number, not text"),
        ("http_port: 0x10", ", line 1: http_port: must be a whole number, not text"),
        ("http_port: 1:30", ", line 1: http_port: must be a whole number, not text"),
        ("http_port: " + "9" * 30, ", line 1: http_port: must be a whole number, not a number"),
        ("http_port: {a: 1}", ", line 1: http_port: must be a whole number, not keys with values"),
        ("wait_s: soon", ", line 1: wait_s: must be a number, not text"),
        ("wait_s: .inf", ", line 1: wait_s: must be a number, not text"),
        ("wait_s: 1e999", ", line 1: wait_s: must be a finite number"),
        ("log_json: yes", ", line 1: log_json: must be true or false, not text"),
        ("log_json: 1", ", line 1: log_json: must be true or false, not a whole number"),
        ("name: 7", ", line 1: name: must be text, not a whole number; put it in quotes"),
        ("name:", ", line 1: name: must be text, not nothing"),
        ('name: "a\\0b"', ", line 1: name: must not hold a NUL"),
        ("model: ''", ", line 1: model: must not be empty"),
        ("model: ~nobody-of-this-name/x", ", line 1: model: names a home directory that is not known"),
        ("log_level: loud", ", line 1: log_level: must be one of info, debug, not 'loud'"),
        ("transports: tcp", ", line 1: transports: must be a list, each item text, not text"),
        ("sizes:\n- 1\n- x", ", line 3: sizes[1]: must be a whole number, not text"),
        ("sizes: [1, [2]]", ", line 1: sizes[1]: must be a whole number, not a list"),
        ("- 1", ", line 1: must be keys with values"),
        ("name: &a x\nmodel: *a", ", line 2: aliases are not taken"),
        ("name: !!python/name:os.system x", ", line 1: tags are not taken"),
        ("name: !!str x", ", line 1: tags are not taken"),
        ("<<: {name: a}", ", line 1: there is no key '<<'"),
        ("sizes: [[[[[1]]]]]", ", line 1: this is nested too deeply"),
        ("name: a\n---\nname: b", ", line 2: but found another document"),
        ("name: [a", ", line 1: expected ',' or ']', but got '<stream end>'"),
        ("name: a\x01b", ": there are characters in it that YAML does not allow"),
        (b"name: \xff", ": this is not UTF-8"),
    ],
)
def test_what_cannot_be_taken_is_said_with_its_line_and_key(text: str | bytes, said: str, tmp_path: Path) -> None:
    assert _said(tmp_path, text) == said


def test_sections_have_keys_of_their_own_and_say_where(tmp_path: Path) -> None:
    inner = Section((Option("size", int),), {"model": "this belongs at the top"})
    assert _read(tmp_path, "name: a\ninner:\n  size: 3", inner=inner) == {"name": "a", "inner": {"size": 3}}
    assert _read(tmp_path, "inner:", inner=inner) == {"inner": {}}
    assert _said(tmp_path, "inner:\n  size: x", inner=inner) == ", line 2: inner.size: must be a whole number, not text"
    assert _said(tmp_path, "inner:\n  siez: 1", inner=inner) == (
        ", line 2: there is no key 'siez' in inner; did you mean size?"
    )
    assert _said(tmp_path, "inner:\n  model: x", inner=inner) == ", line 2: inner.model: this belongs at the top"
    assert _said(tmp_path, "inner: 3", inner=inner) == ", line 1: inner: must be keys with values"
    assert _said(tmp_path, "inner: {}\ninner: {}", inner=inner) == ", line 2: inner: is there twice"


def test_no_message_shows_what_could_be_a_secret(tmp_path: Path) -> None:
    for text in ("http_port: hunter2", "api_key: hunter2", "name: [hunter2", "model: {hunter2: 1}", "- hunter2"):
        assert "hunter2" not in _said(tmp_path, text)


def test_a_file_has_a_bounded_size(tmp_path: Path) -> None:
    rest = "name: a\n"
    assert _read(tmp_path, rest + "#" * (MAX_FILE_BYTES - len(rest))) == {"name": "a"}
    assert "at most 65536 bytes" in _said(tmp_path, rest + "#" * (MAX_FILE_BYTES - len(rest) + 1))


@pytest.mark.parametrize("text", ["[" * 9_000, "a: " + "{" * 9_000, "- " * 30_000, "? " * 30_000, "&a " * 20_000])
def test_files_made_to_hurt_are_refused(text: str, tmp_path: Path) -> None:
    assert _said(tmp_path, text)


_TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=20)
_ODD = ["null", "~", "yes", "1", "1e3", "- a", "a: b", "#", "é", "\u2028", "\x85", "\ufeff"]
_PATHS = _TEXT.filter(lambda text: text and not text.startswith("~")).map(Path)


@settings(deadline=None, max_examples=40)
@given(
    config=st.builds(
        Sample,
        model=_PATHS,
        http_port=st.integers(0, 65535),
        wait_s=st.floats(allow_nan=False, allow_infinity=False),
        log_json=st.booleans(),
        transports=st.lists(_TEXT, max_size=3).map(tuple),
        sizes=st.lists(st.integers(-(10**17), 10**17), max_size=3).map(tuple),
        log_level=st.sampled_from(["info", "debug"]),
        name=_TEXT
        | st.sampled_from(["null", "~", "yes", "1", "1e3", "- a", "a: b", "#", "é", "\u2028", "\x85", "\ufeff"]),
        secret_file=st.none() | _PATHS,
        limit=st.none() | st.integers(0, 9),
    )
)
def test_a_printed_configuration_is_read_as_the_same(config: Sample, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "printed.yaml"
    path.write_text(config_yaml(config), encoding="utf-8")
    assert Sample(**read_config_file(path, TOP)) == config


def test_text_that_reads_like_something_else_stays_text(tmp_path: Path) -> None:
    odd = [
        *_ODD,
        "true",
        "FALSE",
        "Null",
        "no",
        "on",
        "1.5",
        "-1",
        "",
        " a",
        "a ",
        "[a]",
        "{}",
        "a, b",
        "&a",
        "*a",
        "!a",
    ]
    for text in odd:
        assert _read(tmp_path, as_yaml({"name": text, "transports": (text, text)})) == {
            "name": text,
            "transports": (text, text),
        }
    # Other readers of YAML see booleans here.
    assert as_yaml({"name": "yes"}) == 'name: "yes"\n'


def test_sections_are_printed_below_their_key(tmp_path: Path) -> None:
    text = as_yaml({"name": "a", "inner": {"size": 3}, "other": {}})
    assert text == "name: a\ninner:\n  size: 3\nother: {}\n"
    sections = {name: Section((Option("size", int),)) for name in ("inner", "other")}
    assert _read(tmp_path, text, **sections) == {"name": "a", "inner": {"size": 3}, "other": {}}


def _file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return f"--config={path}"


def test_flags_go_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = _file(tmp_path, "model: m\nhttp_port: 1\ntransports: [ucx, tcp]\nlog_json: true\nlimit: null\n")
    assert parse_config(Sample, [file]) == Sample(
        model=Path("m"), http_port=1, transports=("ucx", "tcp"), log_json=True, limit=None
    )
    flags = [file, "--http-port=2", "--transports=shm", "--transports=tcp", "--no-log-json", "--limit=3"]
    assert parse_config(Sample, flags) == Sample(model=Path("m"), http_port=2, transports=("shm", "tcp"), limit=3)


@pytest.mark.parametrize(
    ("text", "flags", "said"),
    [
        ("http_port: 1", [], "required, as flags or in the --config file: --model"),
        ("model: m\nhttp_port: 70000", [], "--http-port must be a port, not 70000"),
        ("model: m\nhttp_prot: 1", [], "did you mean http_port?"),
        ("model: m", ["--config=nothing.yaml"], "--config: may be given once"),
    ],
)
def test_a_bad_file_ends_the_process_with_status_2(
    text: str, flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_config(Sample, [_file(tmp_path, text), *flags])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "nothing.yaml", tmp_path):
        with pytest.raises(SystemExit) as caught:
            parse_config(Sample, ["--config", str(path)])
        assert caught.value.code == 2
        assert str(path) in capsys.readouterr().err


def test_flags_made_of_a_configuration_give_the_same_whatever_the_file_says_later(tmp_path: Path) -> None:
    file = _file(tmp_path, "model: m\nhttp_port: 1\nlog_json: true\ntransports: []\nname: -x\n")
    config = parse_config(Sample, [file, "--secret-file", "s"])
    assert parse_config(Sample, config_flags(config)) == config


def test_numbers_have_units_from_their_names_or_their_declarations() -> None:
    units = {option.name: unit_of(option) for option in options_of(Sample)}
    assert units["wait_s"] == "seconds"
    assert units["sizes"] == "tokens"
    assert {units["http_port"], units["transports"], units["log_json"]} == {""}


def test_a_process_without_a_file_loads_no_yaml_reader() -> None:
    program = "import sys, runtime.config, router.config; sys.exit('yaml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=100, check=False).returncode == 0
