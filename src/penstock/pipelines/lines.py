"""On which line of a TOML file each key is: the parser of the standard library does not tell.

The text has been parsed before, so it is right, and only what stands around keys must be known: strings, comments,
arrays and inline tables, any of which may hold something that looks like a key.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from typing import Final

Key = tuple[str, ...]

_PART: Final = re.compile(r"""[A-Za-z0-9_-]+|"(?:\\.|[^"\\\n])*"|'[^'\n]*'""")
_STRING: Final = re.compile(
    r'''"""(?:\\.|[^\\])*?""""{0,2}'''
    r"""|'''.*?''''{0,2}"""
    r'''|"(?:\\.|[^"\\\n])*"'''
    r"""|'[^'\n]*'""",
    re.DOTALL,
)
# Numbers, times and switches.
_BARE: Final = re.compile(r"[^,\]}\n#]+")
_BETWEEN: Final = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
_BLANKS: Final = re.compile(r"[ \t]*")


@dataclass(frozen=True, slots=True)
class Lines:
    """Both count from 1."""

    # Where a key, or the first header of a table, stands.
    keys: dict[Key, int] = field(default_factory=dict)
    # Where the text of a string begins: a line below its key if a line break follows the quotes.
    texts: dict[Key, int] = field(default_factory=dict)

    def of(self, key: Key) -> int:
        """That of the key or, if it is not there, of the table where it would be; else the first."""
        while key and key not in self.keys:
            key = key[:-1]
        return self.keys.get(key, 1)


def scan(text: str) -> Lines:
    return _Scan(text).run()


class _Scan:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._found = Lines()

    def run(self) -> Lines:
        table: Key = ()
        self._skip(_BETWEEN)
        while self._at < len(self._text):
            if self._take("["):
                self._take("[")
                table = self._key(())
                self._take("]")
                self._take("]")
            else:
                self._pair(table)
            self._skip(_BETWEEN)
        return self._found

    def _pair(self, table: Key) -> None:
        key = self._key(table)
        self._take("=")
        self._value(key)

    def _key(self, table: Key) -> Key:
        """What it is made of is noted, too: `a.b = 1` makes `a`."""
        key = table
        while True:
            self._skip(_BLANKS)
            part = self._skip(_PART)
            key += (tomllib.loads(f"part = {part}")["part"] if part[:1] in ('"', "'") else part,)
            self._found.keys.setdefault(key, self._line(self._at))
            self._skip(_BLANKS)
            if not self._take("."):
                return key

    def _value(self, key: Key) -> None:
        self._skip(_BLANKS)
        begin = self._at
        if string := self._skip(_STRING):
            quotes = 3 if string[:3] in ('"""', "'''") else 1
            broken = re.match(r"\r?\n", string[quotes:])
            self._found.texts.setdefault(key, self._line(begin) + (1 if broken else 0))
        elif self._take("["):
            while not self._ends("]"):
                self._value(key)
        elif self._take("{"):
            while not self._ends("}"):
                self._pair(key)
        else:
            self._skip(_BARE)

    def _ends(self, closing: str) -> bool:
        self._skip(_BETWEEN)
        self._take(",")
        self._skip(_BETWEEN)
        return self._take(closing)

    def _take(self, text: str) -> bool:
        self._skip(_BLANKS)
        is_there = self._text.startswith(text, self._at)
        self._at += len(text) if is_there else 0
        return is_there

    def _skip(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self._at)
        if found is None:
            return ""
        self._at = found.end()
        return found[0]

    def _line(self, position: int) -> int:
        return self._text.count("\n", 0, position) + 1
