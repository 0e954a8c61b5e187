"""A process that stops in the middle of a conversion until it is told to go on (or is killed)."""

from multiprocessing.connection import Connection
from pathlib import Path

from engine.prepare import prepare_model


def prepare_halfway(source: Path, cache: Path, pipe: Connection) -> None:
    """Prepare `source`; send "half" in the middle of the weights and wait for a message; at the end send the path."""
    waited: list[float] = []

    def progress(stage: str, fraction: float) -> None:
        if stage == "converting weights" and fraction > 0.6 and not waited:
            waited.append(fraction)
            pipe.send("half")
            pipe.recv()

    pipe.send(prepare_model(source, cache, progress).path)
