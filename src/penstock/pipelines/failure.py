"""What went wrong, in one sentence: Spark tells it with conditions, states, plans and the stacks of two languages.

[STREAM_FAILED] Query [id = …] terminated with exception: … Traceback … ValueError: the sentence
[UNRESOLVED_COLUMN.WITH_SUGGESTION] The sentence. SQLSTATE: 42703; line 1 pos 7;⏎ 'Project ['amout] …
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from penstock.errors import PenstockError

# The last line of a Python traceback: the class of the error, and what it says.
_RAISED: Final = re.compile(r"^(?:\w+\.)*(?:[A-Z]\w*): (.+)$", re.MULTILINE)
_OURS: Final = re.compile(r"^penstock\.errors\.\w+: (.+)$", re.MULTILINE)
_TRACEBACK: Final = "Traceback (most recent call last):"
_STREAM: Final = re.compile(r"^(?:\[STREAM_FAILED\] )?Query \[.*?\] terminated with exception: ", re.DOTALL)
_CONDITION: Final = re.compile(r"^\[[A-Z0-9_.]+\] ")
_STATE: Final = re.compile(r"\s*SQLSTATE: \w{5}")
_PLACE: Final = re.compile(r"[;(] ?line (\d+),? pos \d+[;)]?")


class Failure(NamedTuple):
    sentence: str
    # Of the SQL, from 1; None if Spark does not say.
    line: int | None = None


def describe(error: BaseException) -> Failure:
    """Of whatever Spark, the connector or a pipeline's own code raised."""
    if isinstance(error, PenstockError):
        return Failure(str(error))
    return parse(_text(error))


def parse(text: str) -> Failure:
    text = _STREAM.sub("", text.strip())
    if _TRACEBACK in text:
        return Failure(_of_python(text))
    head = text.partition("\n")[0]
    place = _PLACE.search(text.partition("\n\n")[0])
    sentence = _CONDITION.sub("", _PLACE.sub("", _STATE.sub("", head)))
    return Failure(sentence.strip().rstrip(";").strip(), int(place[1]) if place else None)


def _of_python(text: str) -> str:
    """Ours if there is one, as it says what to do; else that of the first traceback, which is the cause of others."""
    ours = _OURS.findall(text)
    if ours:
        return _cleaned(ours[-1])
    raised = _RAISED.findall(text[text.index(_TRACEBACK) :])
    return _cleaned(raised[0]) if raised else _cleaned(text.partition("\n")[0])


def _cleaned(sentence: str) -> str:
    return _CONDITION.sub("", _STATE.sub("", sentence)).strip()


def _text(error: BaseException) -> str:
    """Of an error of Java without the name of its class."""
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
