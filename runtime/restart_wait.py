"""How long to wait before a process that has died is started again."""

from dataclasses import dataclass, field

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 15.0
HEALTHY_LIFE_S = 60.0


@dataclass(slots=True)
class RestartWait:
    """Waits that double with each death in a row. Pure; one process's, for all its lives.

    A process that lived `healthy_life_s` is started again as quickly as after its first death.
    """

    first_s: float = FIRST_WAIT_S
    longest_s: float = LONGEST_WAIT_S
    healthy_life_s: float = HEALTHY_LIFE_S
    _next_s: float = field(default=0.0, init=False)

    def after(self, lived_s: float) -> float:
        """The wait in seconds after a life of `lived_s` seconds (0: it never became ready)."""
        if lived_s >= self.healthy_life_s:
            self._next_s = 0.0
        wait_s = min(self._next_s or self.first_s, self.longest_s)
        self._next_s = 2 * wait_s
        return wait_s
