"""Names of fields where one body is made from another: errors name what the client sent."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from runtime.errors import KvferryError

_MESSAGE: Final = re.compile(r"messages\[(\d+)\].*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class FieldNames:
    """From the fields of a chat body, which checks know, to those of the body that it was made from.

    `messages` has the place that each message comes from. `beginnings` are pairs of a regular expression, tried in
    order at the beginning of a field, and what stands there in the other body.
    """

    messages: tuple[str, ...] = ()
    beginnings: tuple[tuple[re.Pattern[str], str], ...] = ()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """`with names.applied():` a KvferryError leaves the block with the client's name for its field."""
        try:
            yield
        except KvferryError as error:
            raise self.renamed(error) from None

    def renamed(self, error: KvferryError) -> KvferryError:
        """The same error with the client's name for its field, also where its message begins with that."""
        field = self._name(error.field)
        if field == error.field:
            return error
        message = error.message
        if message.startswith(error.field):
            message = field + message[len(error.field) :]
        return KvferryError(error.code, message, field=field, retry_after_ms=error.retry_after_ms)

    def _name(self, field: str) -> str:
        if (match := _MESSAGE.fullmatch(field)) and int(match[1]) < len(self.messages):
            return self.messages[int(match[1])]
        for pattern, name in self.beginnings:
            renamed, count = pattern.subn(name, field, count=1)
            if count and pattern.match(field):
                return renamed
        return field


OWN_NAMES: Final = FieldNames()
"""For the bodies that are checked as they come."""
