"""What is wrong with the files of a dataset: all of it counted, the first few named, in one line."""

from dataclasses import dataclass, field

from resources.errors import HanzoError, invalid

MAX_SHOWN = 3


@dataclass(frozen=True)
class Problem:
    """What is wrong with one line or row of a file; nothing of `where` where it is the whole file."""

    reason: str
    where: str = ""


EMPTY = Problem("is empty: a dataset needs at least one record")
"""Of a whole file: among others that hold records it is a part that nothing was written to."""
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
    """What a library's error says, for a refusal: the rest is for those who know the library."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
