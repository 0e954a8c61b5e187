"""`kvferry keys new`: a new API key, and the line that lets it in."""

import argparse
import hashlib
import json
import re
import secrets
from typing import Any

from kvferry.commands.base import Command
from kvferry.console import Console

KEY_PREFIX = "kvf-"
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LIMITS = ("max_in_flight", "max_queued_tokens", "max_tokens_per_minute")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    new = actions.add_parser("new", help="Make a key. It is shown once; the line for --api-keys-file has its digest.")
    new.add_argument("--tenant", required=True, metavar="NAME", help="Whose key it is.")
    new.add_argument("--max-in-flight", type=int, metavar="N", help="Sequences at a time. Default: no limit.")
    new.add_argument("--max-queued-tokens", type=int, metavar="N", help="Prompt tokens that wait. Default: no limit.")
    new.add_argument(
        "--max-tokens-per-minute", type=int, metavar="N", help="Tokens of prompts and answers. Default: no limit."
    )
    new.add_argument(
        "--weight", type=float, metavar="X", help="Share among tenants that wait, 0.01 to 100. Default: 1."
    )
    new.add_argument("--max-priority", type=int, metavar="N", help="Highest priority of its requests. Default: 0.")
    new.add_argument("--admin", action="store_true", help="Let it see what other tenants have under way.")
    # Below the action too, where one expects it; the default is that of the command line.
    new.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="Machine-readable output.")


def _run(arguments: argparse.Namespace, console: Console) -> int:
    key = new_key()
    entry = key_entry(arguments, key)
    console.emit({"key": key, "entry": entry})
    console.say(f"key:   {key}")
    console.say(f"entry: {json.dumps(entry)}")
    console.say(
        "The key is shown only now. Add the entry as a line to the router's --api-keys-file, which it reads anew."
    )
    return 0


def new_key() -> str:
    """A key of 256 random bits."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def key_entry(arguments: argparse.Namespace, key: str) -> dict[str, Any]:
    """The line of the file for `key`, which it does not hold. Raises ValueError for what the router would refuse."""
    if not _TENANT.fullmatch(arguments.tenant):
        raise ValueError("--tenant must be 1 to 64 of A-Z a-z 0-9 . _ - and begin with a letter or digit")
    entry: dict[str, Any] = {"tenant": arguments.tenant, "key_sha256": [hashlib.sha256(key.encode()).hexdigest()]}
    for name in _LIMITS:
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
        if value is not None:
            entry[name] = value
    if arguments.weight is not None:
        if not 0.01 <= arguments.weight <= 100:
            raise ValueError("--weight must be 0.01 to 100")
        entry["weight"] = arguments.weight
    if arguments.max_priority is not None:
        if not -100 <= arguments.max_priority <= 100:
            raise ValueError("--max-priority must be -100 to 100")
        entry["max_priority"] = arguments.max_priority
    if arguments.admin:
        entry["admin"] = True
    return entry


COMMAND = Command("keys", "Make API keys.", _add_arguments, _run)
