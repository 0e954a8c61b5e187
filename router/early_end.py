"""How the reader of a token stream says that the answer is complete, which is not the same as going away."""


class EnoughTokens(Exception):
    """Thrown into `Dispatcher.tokens` (with `athrow`) when a stop string has ended the answer.

    The request is cancelled on its workers and counts as finished; the stream's next and last item is its TokenEnd,
    whose receipt holds what is known by then.
    """
