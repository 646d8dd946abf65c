"""A run sent back to an earlier checkpoint on request, and the branch that it continues on.

A branch is a folder of checkpoints, and the next one lies below it: what a run did on earlier branches stays as it is.
"""

from pydantic import Field

from recipes.contracts.frozen_model import FrozenModel


class Rewind(FrozenModel):
    """To the checkpoint of `step`, of a run whose metrics are known up to step `done`, once its program has ended: `at` that
    time, in ms since 1970.
    """

    step: int = Field(ge=1)
    done: int | None = None
    at: int | None = Field(None, exclude_if=lambda value: value is None)  # what an earlier release began keeps its digest

    @property
    def repeated_steps(self) -> range:
        """Steps that are logged once more: what is known of them is of weights that the run does not go on with."""
        return range(self.step + 1, (self.done or self.step) + 1)


def rewind_folder(step: int) -> str:
    """The folder, below that of the way before, of checkpoints that come after going back to `step`; 0 is the beginning."""
    return f"from-{step}"
