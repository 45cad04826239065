"""The versions of a pipeline file that have run, so that a failing change can be rolled back.

They are kept by the name of the file, because the file that has to be replaced may be unreadable:

    <data>/versions/<file>/
           accepted    the last version that processed a batch
           previous    the one before it
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.errors import PenstockError
from penstock.pipelines.state_directory import DATA
from penstock.spark.durable_files import write_durably


@dataclass(frozen=True, slots=True)
class FileVersions:
    file: Path
    directory: Path

    @classmethod
    def of(cls, file: Path, data: Path | None = None) -> FileVersions:
        """`data` is the directory with the state of pipelines; the default is `data` beside the file."""
        return cls(file, (file.parent / DATA if data is None else data) / "versions" / file.name)

    def accept(self, content: str) -> None:
        """Keep the content of a file that has just processed a batch."""
        accepted = _read(self._accepted)
        if accepted == content:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        if accepted is not None:
            write_durably(self._previous, accepted)
        write_durably(self._accepted, content)

    def roll_back(self) -> Path:
        """Restore the last version that has run, or the one before if that is what the file holds.

        The replaced content is kept beside the file. Return where.
        """
        present = _read(self.file)
        for path in (self._accepted, self._previous):
            version = _read(path)
            if version is not None and version != present:
                kept = self.file.with_name(f"{self.file.name}.rejected")
                if present is not None:
                    write_durably(kept, present)
                write_durably(self.file, version)
                return kept
        raise PenstockError(
            f"{self.file} has no other version to go back to: `penstock pipelines serve` keeps the last two versions "
            f"that processed a batch, in {self.directory}"
        )

    @property
    def _accepted(self) -> Path:
        return self.directory / "accepted"

    @property
    def _previous(self) -> Path:
        return self.directory / "previous"


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None
