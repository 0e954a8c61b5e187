"""Where a process listens, as the kernel tells it."""

import re
from contextlib import suppress
from pathlib import Path

LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
"""127.0.0.1, ::1, and 127.0.0.1 on a socket of both families, which is how gRPC listens."""
_LISTEN = "0A"


def listening(pid: int) -> set[tuple[str, int]]:
    """(address, as the kernel prints it in hexadecimal; port) of each TCP socket on which this process listens."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            inodes.update(re.findall(r"socket:\[(\d+)\]", str(entry.readlink())))
    tables = [Path(f"/proc/{pid}/net/{name}").read_text(encoding="ascii") for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    local = [row[1].split(":") for row in rows if row[3] == _LISTEN and row[9] in inodes]
    return {(address, int(port, 16)) for address, port in local}
