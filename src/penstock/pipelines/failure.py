"""The cause of a failure in one sentence. Spark reports it with error classes, plans and the stacks of two languages.

[STREAM_FAILED] Query [id = …] terminated with exception: … Traceback … ValueError: the sentence
[UNRESOLVED_COLUMN.WITH_SUGGESTION] The sentence. SQLSTATE: 42703; line 1 pos 7;⏎ 'Project ['amout] …
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from penstock.errors import PenstockError

# The last line of a Python traceback: the class of the error and its message.
_RAISED: Final = re.compile(r"^(?:\w+\.)*(?:[A-Z]\w*): (.+)$", re.MULTILINE)
_OURS: Final = re.compile(r"^penstock\.errors\.\w+: (.+)$", re.MULTILINE)
_TRACEBACK: Final = "Traceback (most recent call last):"
_STREAM: Final = re.compile(r"^(?:\[STREAM_FAILED\] )?Query \[.*?\] terminated with exception: ", re.DOTALL)
_CONDITION: Final = re.compile(r"^\[[A-Z0-9_.]+\] ")
_STATE: Final = re.compile(r"\s*SQLSTATE: \w{5}")
_POSITION: Final = re.compile(r"[;(] ?line (\d+),? pos \d+[;)]?")


class Failure(NamedTuple):
    sentence: str
    # The line within the SQL, starting at 1; None if Spark does not report one.
    line: int | None = None


def describe(error: BaseException) -> Failure:
    """Describe an error of Spark, of the connector or of a pipeline's own code."""
    if isinstance(error, PenstockError):
        return Failure(str(error))
    return parse(_text(error))


def parse(text: str) -> Failure:
    """Find the sentence in the text of an error."""
    text = _STREAM.sub("", text.strip())
    if _TRACEBACK in text:
        return Failure(_of_python(text))
    head = text.partition("\n")[0]
    position = _POSITION.search(text.partition("\n\n")[0])
    sentence = _CONDITION.sub("", _POSITION.sub("", _STATE.sub("", head)))
    return Failure(sentence.strip().rstrip(";").strip(), int(position[1]) if position else None)


def _of_python(text: str) -> str:
    """Prefer an error of Penstock, which says what to do; else take the first traceback, the cause of the others."""
    ours = _OURS.findall(text)
    if ours:
        return _cleaned(ours[-1])
    raised = _RAISED.findall(text[text.index(_TRACEBACK) :])
    return _cleaned(raised[0]) if raised else _cleaned(text.partition("\n")[0])


def _cleaned(sentence: str) -> str:
    return _CONDITION.sub("", _STATE.sub("", sentence)).strip()


def _text(error: BaseException) -> str:
    """Return the message of an error. That of a Java error lacks the name of its class."""
    for each in _chain(error):
        java = getattr(each, "java_exception", None)
        if java is not None:
            return str(java.getMessage() or java.toString())
    return str(error) or type(error).__name__


def _chain(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__
