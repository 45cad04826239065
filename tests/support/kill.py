"""kill -9 of a process that appends, judged by the journal of what it had acknowledged."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from random import Random

from penstock.log.log import Log
from penstock.store.store import Store


class KillJudge:
    """Lives on one directory, each killed at another moment; nothing that one acknowledged may be missing later."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        self.random = Random(seed)
        # topic -> offset -> value
        self.acknowledged: dict[str, dict[int, bytes]] = defaultdict(dict)

    def kill_one(self) -> None:
        lines = self.random.choice((1, 10, 100, 1000)) * self.random.randint(1, 5)
        command = [sys.executable, "-m", "tests.support.appender", str(self.directory)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            try:
                for _ in range(lines):
                    self._note(process.stdout.readline())
            finally:
                process.kill()
            # What was still on its way to us had been acknowledged as well.
            for line in process.stdout:
                self._note(line)
        self.check()

    def check(self) -> None:
        with Store(self.directory) as store:
            for topic in store.topics:
                present = _read_all(store.log(topic.id))
                acknowledged = self.acknowledged[topic.name]
                missing = {offset for offset, value in acknowledged.items() if present.get(offset) != value}
                assert not missing, f"{topic.name}: acknowledged and not there: {sorted(missing)[:10]}"
                assert len(set(present.values())) == len(present), f"{topic.name}: a message is there twice"

    def _note(self, line: bytes) -> None:
        if not line.endswith(b"\n"):
            assert not line, f"half a line: {line!r}"
            return
        topic, offset, value = line.split()
        before = self.acknowledged[topic.decode()].setdefault(int(offset), value)
        assert before == value, f"offset {offset!r} was given to {before!r} and to {value!r}"


def _read_all(log: Log) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    offset = log.start
    while batches := log.read(offset, 1 << 20):
        for batch in batches:
            columns = batch.columns()
            found.update(zip(columns.offsets(), columns.values(), strict=True))
        offset = batches[-1].end
    return found
