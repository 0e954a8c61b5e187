from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from runtime.config import config_yaml, flag, parse_config, required_flag


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample process.

    More that --help does not show.
    """

    model: Path = required_flag("Directory of the model.")
    http_port: int = flag(8000, "Port; 50% of them are taken.")
    ratio: float = flag(0.5, "A ratio.")
    log_json: bool = flag(False, "JSON logs.")
    checksums: bool = flag(True, "Verify checksums.")
    transports: tuple[str, ...] = flag(("shm", "tcp"), "Transports.")
    sizes: tuple[int, ...] = flag((), "Sizes.")
    log_level: Literal["info", "debug"] = flag("info", "Level.")
    secret_file: Path | None = flag(None, "Secret.")
    limit: int | None = flag(None, "Limit.")

    def validate(self) -> None:
        if not 0 <= self.http_port < 65536:
            raise ValueError(f"--http-port must be a port, not {self.http_port}")


def test_defaults_come_from_the_dataclass() -> None:
    assert parse_config(Sample, ["--model", "m"]) == Sample(model=Path("m"))


def test_every_type_of_field_is_read() -> None:
    argv = (
        "--model m --http-port 1 --ratio 2.5 --log-json --no-checksums --transports tcp --sizes 1,2 --sizes 3 "
        "--log-level debug --secret-file s --limit 7"
    )
    assert parse_config(Sample, argv.split()) == Sample(
        model=Path("m"),
        http_port=1,
        ratio=2.5,
        log_json=True,
        checksums=False,
        transports=("tcp",),
        sizes=(1, 2, 3),
        log_level="debug",
        secret_file=Path("s"),
        limit=7,
    )


def test_a_list_given_replaces_the_default_and_repeats_add_up() -> None:
    config = parse_config(Sample, ["--model", "m", "--transports", "tcp", "--transports", "memory, shm"])
    assert config.transports == ("tcp", "memory", "shm")
    assert parse_config(Sample, ["--model", "m"]).transports == ("shm", "tcp")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "--model"),
        (["--model", "m", "--no-such-flag"], "--no-such-flag"),
        (["--model", "m", "--http", "1"], "--http"),
        (["--model", "m", "stray"], "stray"),
        (["--model", "m", "--http-port", "x"], "--http-port"),
        (["--model", "m", "--http-port", "70000"], "must be a port, not 70000"),
        (["--model", "m", "--ratio", "nan"], "finite"),
        (["--model", "m", "--ratio", "inf"], "finite"),
        (["--model", "m", "--log-level", "loud"], "loud"),
        (["--model", "m", "--sizes", "1,x"], "--sizes"),
        (["--model", ""], "empty"),
    ],
)
def test_bad_flags_end_with_status_2_and_say_which(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_config(Sample, argv)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_print_config_prints_the_validated_values_as_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_config(Sample, ["--model", "m", "--print-config", "--limit", "3"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert printed == config_yaml(Sample(model=Path("m"), limit=3))
    assert printed.splitlines() == [
        "model: m",
        "http_port: 8000",
        "ratio: 0.5",
        "log_json: false",
        "checksums: true",
        "transports: [shm, tcp]",
        "sizes: []",
        "log_level: info",
        "secret_file: null",
        "limit: 3",
    ]


def test_print_config_still_refuses_what_is_invalid(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_config(Sample, ["--model", "m", "--print-config", "--http-port", "-1"])
    assert caught.value.code == 2
    assert capsys.readouterr().out == ""


def test_help_shows_flags_help_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config(Sample, ["--help"], prog="sample")
    shown = " ".join(capsys.readouterr().out.split())
    assert "A sample process." in shown
    assert "More that" not in shown
    assert "Port; 50% of them are taken. Default: 8000." in shown
    assert "Default: shm,tcp." in shown
    assert "--no-checksums" in shown


def test_a_type_that_cannot_be_a_flag_is_a_defect_of_the_program() -> None:
    @dataclass(frozen=True)
    class Bad:
        table: dict[str, int] = required_flag("A table.")

        def validate(self) -> None: ...

    with pytest.raises(TypeError, match="table"):
        parse_config(Bad, [])
