"""Rewinds.

A run returns to an earlier checkpoint on request and continues on a new branch. A branch is a folder of checkpoints, nested
in the previous branch; what a run did on earlier branches is kept.
"""

from pydantic import Field

from recipes.contracts.frozen_model import FrozenModel


class Rewind(FrozenModel):
    """A rewind to the checkpoint of `step`.

    Attributes:
        done: last step with known metrics when the run's program had ended.
        at: time of the request, in ms since 1970.
    """

    step: int = Field(ge=1)
    done: int | None = None
    # omitted if unset, so that digests from before this key stay the same
    at: int | None = Field(None, exclude_if=lambda value: value is None)

    @property
    def repeated_steps(self) -> range:
        """Steps that will be logged again: their known metrics belong to discarded weights."""
        return range(self.step + 1, (self.done or self.step) + 1)


def rewind_folder(step: int) -> str:
    """Return the folder, inside the previous branch's, for checkpoints after a rewind to `step`.

    0 is the start.
    """
    return f"from-{step}"
