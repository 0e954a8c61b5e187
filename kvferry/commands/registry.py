"""All commands, in the order of `kvferry --help`. A new one is a module with a COMMAND and a line here."""

from kvferry.commands import (
    chat,
    complete,
    demo,
    doctor,
    down,
    keys,
    receipt,
    restart,
    scale,
    status,
    up,
    verify,
    worker,
)
from kvferry.commands.base import Command

COMMANDS: tuple[Command, ...] = (
    up.COMMAND,
    chat.COMMAND,
    complete.COMMAND,
    status.COMMAND,
    scale.COMMAND,
    restart.COMMAND,
    worker.COMMAND,
    down.COMMAND,
    receipt.COMMAND,
    keys.COMMAND,
    doctor.COMMAND,
    verify.COMMAND,
    demo.COMMAND,
)
