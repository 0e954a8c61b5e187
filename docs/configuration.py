"""Write the tables of configuration.md, beside this file, from the declarations of the options, or check them.

    python docs/configuration.py            write
    python docs/configuration.py --check    exit 1 if they differ, as `make check` does

The words above the tables are written by hand.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from decode_worker.config import DecodeConfig
from kvferry.__main__ import build_parser
from kvferry.cluster_file import SECTIONS, UpKeys, section_options
from prefill_worker.config import PrefillConfig
from router.config import RouterConfig
from runtime.config import default_text
from runtime.config_options import Option, options_of, unit_of

PAGE = Path(__file__).with_suffix(".md")
MARK = "<!-- From here on written by docs/configuration.py, from the declarations in the code. -->"

_PROCESSES = {"router": RouterConfig, "prefill": PrefillConfig, "decode": DecodeConfig}
_GROUPS = {
    "All processes": ("router", "prefill", "decode"),
    "Router": ("router",),
    "Workers of both roles": ("prefill", "decode"),
    "Prefill workers": ("prefill",),
    "Decode workers": ("decode",),
}
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "text", Path: "path"}
_HEADER = ("key", "type", "default", "unit", "meaning")


def tables() -> str:
    """Everything behind the mark."""
    by_process = {name: options_of(config) for name, config in _PROCESSES.items()}
    parts = []
    for title, processes in _GROUPS.items():
        rows = [_row(option) for option in _common_to(by_process, processes)]
        if rows:
            parts.append(f"## {title}\n\n{_table(_HEADER, rows)}")
    parts.append(f"## The top of a cluster file, and flags of `kvferry up`\n\n{_table(_HEADER, _up_rows(by_process))}")
    return "\n".join(parts)


def _common_to(by_process: dict[str, tuple[Option, ...]], processes: Sequence[str]) -> Iterable[Option]:
    """Options that are the same in these processes and in no other."""
    for option in by_process[processes[0]]:
        if [name for name, options in by_process.items() if option in options] == list(processes):
            yield option


def _up_rows(by_process: dict[str, tuple[Option, ...]]) -> list[tuple[str, ...]]:
    keys: UpKeys = build_parser().parse_args(["up"]).keys
    rows = []
    for option in keys.options:
        owners = [section for section in SECTIONS if option.name in {one.name for one in section_options(section)}]
        declared = [one for name in owners for one in by_process[name] if one.name == option.name]
        unit = unit_of(declared[0]) if declared else unit_of(option)
        meaning = option.help + (f" Goes to: {', '.join(owners)}." if owners else "")
        name, kind, default = _row(option)[:3]
        default = "the process's" if owners and option.default is None else default
        rows.append((name, kind, default, unit, _cell(meaning)))
    return rows


def _row(option: Option) -> tuple[str, ...]:
    kind = " / ".join(f"`{choice}`" if choice else "empty" for choice in option.choices) or _TYPES[option.kind]
    kind = f"list of {kind}" if option.many else kind
    if option.required:
        default = "required"
    elif option.default is None:
        default = "none"
    else:
        text = str(option.default).lower() if option.kind is bool else default_text(option.default)
        # The page is the same whoever writes it.
        text = text.replace(str(Path.home()), "~") if option.kind is Path else text
        default = text if text == "none" else f"`{text}`"
    return (f"`{option.name}`", kind, default, unit_of(option), _cell(option.help))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<").strip()


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write or check the tables of all options.")
    parser.add_argument("--check", action="store_true", help="compare with the committed page instead of writing")
    check = parser.parse_args().check
    text = PAGE.read_text()
    current = text[: text.index(MARK)] + MARK + "\n\n" + tables()
    if not check:
        PAGE.write_text(current)
        return 0
    if text != current:
        sys.stderr.write(f"docs/{PAGE.name} is out of date (run `make config-page`)\n")
    return 0 if text == current else 1


if __name__ == "__main__":
    sys.exit(main())
