"""The line of each key in a TOML file, for error messages. The parser of the standard library does not report it.

The text must have been parsed before, so it is valid TOML. The scanner only has to recognise what can contain something
that looks like a key: strings, comments, arrays and inline tables.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from typing import Final

# The path of a key. The number is an index into an array: ("nodes", 0, "id").
Key = tuple[str | int, ...]

_PART: Final = re.compile(r"""[A-Za-z0-9_-]+|"(?:\\.|[^"\\\n])*"|'[^'\n]*'""")
_STRING: Final = re.compile(
    r'''"""(?:\\.|[^\\])*?""""{0,2}'''
    r"""|'''.*?''''{0,2}"""
    r'''|"(?:\\.|[^"\\\n])*"'''
    r"""|'[^'\n]*'""",
    re.DOTALL,
)
# Numbers, times and booleans.
_BARE: Final = re.compile(r"[^,\]}\n#]+")
_BETWEEN: Final = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
_BLANKS: Final = re.compile(r"[ \t]*")


@dataclass(frozen=True, slots=True)
class KeyLines:
    """Line numbers, starting at 1."""

    # The line of a key, or of the first header of a table.
    keys: dict[Key, int] = field(default_factory=dict)
    # The line where the text of a string begins: below its key if a line break follows the quotes.
    texts: dict[Key, int] = field(default_factory=dict)

    def of(self, key: Key) -> int:
        """Return the line of a key; if it is absent, that of the table it belongs to, or else 1."""
        while key and key not in self.keys:
            key = key[:-1]
        return self.keys.get(key, 1)


def scan(text: str) -> KeyLines:
    return _Scan(text).run()


class _Scan:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._found = KeyLines()
        # The number of tables so far in each array of tables.
        self._arrays: dict[Key, int] = {}
        # The last position whose line was asked for. Positions only ascend.
        self._counted = (0, 1)

    def run(self) -> KeyLines:
        table: Key = ()
        self._skip(_BETWEEN)
        while self._at < len(self._text):
            if self._take("[["):
                table = self._element()
                self._take("]]")
            elif self._take("["):
                table = self._key(())
                self._take("]")
            else:
                self._pair(table)
            self._skip(_BETWEEN)
        return self._found

    def _element(self) -> Key:
        """Read the name in `[[nodes]]`, and return the path of the table that begins there."""
        array = self._key(())
        number = self._arrays.get(array, 0)
        self._arrays[array] = number + 1
        return self._note((*array, number), self._at)

    def _pair(self, table: Key) -> None:
        key = self._key(table)
        self._take("=")
        self._value(key)

    def _key(self, table: Key) -> Key:
        """Read a key, and note its prefixes too: `a.b = 1` also defines `a`."""
        key = table
        while True:
            self._skip(_BLANKS)
            part = self._skip(_PART)
            key += (tomllib.loads(f"part = {part}")["part"] if part[:1] in ('"', "'") else part,)
            self._note(key, self._at)
            self._skip(_BLANKS)
            if not self._take("."):
                return key
            if key in self._arrays:
                # `[nodes.options]` belongs to the last of the nodes.
                key += (self._arrays[key] - 1,)

    def _value(self, key: Key) -> None:
        self._skip(_BLANKS)
        begin = self._at
        if string := self._skip(_STRING):
            quotes = 3 if string[:3] in ('"""', "'''") else 1
            broken = re.match(r"\r?\n", string[quotes:])
            self._found.texts.setdefault(key, self._line(begin) + (1 if broken else 0))
        elif self._take("["):
            number = 0
            while not self._ends("]"):
                self._value((*key, number))
                number += 1
        elif self._take("{"):
            self._note(key, begin)
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

    def _note(self, key: Key, position: int) -> Key:
        self._found.keys.setdefault(key, self._line(position))
        return key

    def _line(self, position: int) -> int:
        counted, line = self._counted
        self._counted = position, line + self._text.count("\n", counted, position)
        return self._counted[1]
