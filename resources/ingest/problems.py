"""Collect the problems of a dataset's files in one line.

All are counted, and the first few are named.
"""

from dataclasses import dataclass, field

from resources.errors import HanzoError, invalid

MAX_SHOWN = 3


@dataclass(frozen=True)
class Problem:
    """A problem with one line or row of a file.

    `where` is empty if it concerns the whole file.
    """

    reason: str
    where: str = ""


EMPTY = Problem("is empty: a dataset needs at least one record")
"""Concerns a whole file: if other files have records, an empty one is only a part to which nothing was written."""
CHANGED_WHILE_READ = Problem("was changed while it was read: leave it as it is until its version is made")


@dataclass
class Problems:
    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, file: str, problem: Problem) -> None:
        self.count += 1
        if len(self.first) < MAX_SHOWN:
            self.first.append(f"{file}, {problem.where}: {problem.reason}" if problem.where else f"{file} {problem.reason}")

    def refusal(self, advice: str = "correct the file and create it again") -> HanzoError:
        more = f" (and {self.count - MAX_SHOWN} more)" if self.count > MAX_SHOWN else ""
        return invalid(f"{'; '.join(self.first)}{more}. Nothing was stored: {advice}")


def first_error_line(error: Exception) -> str:
    """Return the first line of a library's error.

    The rest is for users of the library.
    """
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
