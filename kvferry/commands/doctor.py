"""`kvferry doctor`: what this machine has, what is missing, and the command that gets it."""

import argparse
from dataclasses import asdict

from kvferry.commands.base import Command
from kvferry.console import Console
from kvferry.machine import Level, examine

_MARKS = {Level.OK: "ok", Level.NOTE: "note", Level.WARNING: "warning", Level.MISSING: "MISSING"}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-devices", action="store_true", help="Do not load torch to look for GPUs.")


def _run(arguments: argparse.Namespace, console: Console) -> int:
    findings = examine(look_for_devices=not arguments.no_devices)
    missing = [finding for finding in findings if finding.level is Level.MISSING]
    console.emit(
        {
            "ok": not missing,
            "findings": [{**asdict(finding), "level": finding.level.value} for finding in findings],
        }
    )
    rows = []
    for finding in findings:
        rows.append((finding.name, _MARKS[finding.level], finding.text))
        if finding.remedy:
            rows.append(("", "", f"-> {finding.remedy}"))
    console.table(rows)
    console.say(f"\n{len(missing)} needed things are missing." if missing else "\nEverything needed is here.")
    return 1 if missing else 0


COMMAND = Command("doctor", "Show what this machine has and what is missing.", _add_arguments, _run)
