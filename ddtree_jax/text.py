"""Tokens to text as they come: whole characters only, and stop strings found where they end."""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_INCOMPLETE = "\ufffd"  # what a decoder shows for a character whose bytes are not all there


class TextStream:
    """Text of one output. `text` grows with `push`; it is cut before a stop string."""

    def __init__(self, decode: Decode, stop: Sequence[str] = ()):
        self._decode, self._stop = decode, tuple(stop)
        self._ids: list[int] = []
        # Text is decoded from `_start`, a place where a token boundary was a text boundary.
        self._start = self._read = 0
        self._taken = 0
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> bool:
        """Adds a token; True when it completed a stop string."""
        self._ids.append(token)
        known = self._decode(self._ids[self._start : self._read])
        text = self._decode(self._ids[self._start :])
        if not text.endswith(_INCOMPLETE) and len(text) > len(known):
            self._append(text[len(known) :])
            self._start, self._read = self._read, len(self._ids)
        return self.stopped

    def finish(self) -> None:
        """No more tokens come: shows what was held back, an incomplete character too."""
        if not self.stopped:
            known = self._decode(self._ids[self._start : self._read])
            self._append(self._decode(self._ids[self._start :])[len(known) :])
            self._start, self._read = self._read, len(self._ids)

    def take(self, *, all: bool) -> str:
        """Text not taken yet; unless `all`, without an end that may become a stop string."""
        end = len(self.text)
        if not all:
            end -= max((self._overlap(stop) for stop in self._stop), default=0)
        end = max(end, self._taken)
        new, self._taken = self.text[self._taken : end], end
        return new

    def _append(self, new: str) -> None:
        longest = max((len(stop) for stop in self._stop), default=1)
        search_from = max(len(self.text) - longest + 1, 0)
        self.text += new
        found = [place for stop in self._stop if (place := self.text.find(stop, search_from)) >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the text that begins `stop`."""
        for size in range(min(len(stop) - 1, len(self.text)), 0, -1):
            if self.text.endswith(stop[:size]):
                return size
        return 0
