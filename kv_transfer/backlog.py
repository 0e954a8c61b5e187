"""How many bytes were pushed and are not written yet, link by link, and when a full link has room again. Pure."""

DEFAULT_MAX_BACKLOG_BYTES = 64_000_000


class Backlog:
    """Counts for all links of a sender. `max_bytes` is the bound of one link. Not thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes: dict[int, int] = {}
        self._over: set[int] = set()

    @property
    def total_bytes(self) -> int:
        """Over all links."""
        return sum(self._bytes.values())

    def of(self, link: int) -> int:
        """Bytes that wait for this link or are being written on it."""
        return self._bytes.get(link, 0)

    def is_full(self, link: int) -> bool:
        """Whether the link has reached its bound."""
        return self.of(link) >= self._max_bytes

    def change(self, link: int, by_bytes: int) -> bool:
        """Count more (or fewer); whether the link was full and is not any more."""
        left = self.of(link) + by_bytes
        assert left >= 0, f"link {link} has {left} bytes to write"
        if left:
            self._bytes[link] = left
        else:
            self._bytes.pop(link, None)
        if left >= self._max_bytes:
            self._over.add(link)
            return False
        relieved = link in self._over
        self._over.discard(link)
        return relieved
