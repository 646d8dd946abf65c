"""The validation loss does not depend on how the split is sharded."""

from hypothesis import given
from hypothesis import strategies as st

from recipes.contracts.recipe import Recipe
from recipes.contracts.recovery_log import OutOfMemory, RecoveryLog
from recipes.training.metrics.validation_loss import WeightedMeans, combine_means, split_rows


@given(rows=st.integers(1, 40), batch=st.integers(1, 9), processes=st.integers(1, 9))
def test_validation_rows_are_read_once_in_equal_batch_counts_per_process(rows: int, batch: int, processes: int) -> None:
    shares = [split_rows(rows, batch, rank, processes) for rank in range(processes)]
    assert sorted(row for own in shares for some in own for row in some) == list(range(rows))
    assert len({len(own) for own in shares}) == 1
    assert max(len(some) for own in shares for some in own) <= batch


def test_means_of_weight_zero_are_ignored() -> None:
    nothing = WeightedMeans({"loss": float("nan")}, 0)
    assert combine_means(
        [nothing, WeightedMeans({"loss": 1.0, "margin": 2.0}, 3), WeightedMeans({"loss": 5.0, "margin": 6.0}, 1)]
    ) == {
        "loss": 2.0,
        "margin": 3.0,
    }


def test_metric_missing_in_some_parts_is_averaged_over_the_others() -> None:
    """A third-party objective may return different metrics per micro-batch.

    A KeyError used to end its run.
    """
    parts = [
        WeightedMeans({"loss": 1.0}, 3),
        WeightedMeans({"loss": 5.0, "hits": 1.0}, 1),
        WeightedMeans({"loss": 2.0, "hits": 0.0}, 4),
    ]
    assert combine_means(parts) == {"loss": 2.0, "hits": 0.2}


def test_smaller_micro_batch_keeps_samples_per_step_on_any_process_count() -> None:
    """Recorded by a single process, applied to other process counts."""
    shape = {"gpus_per_node": 2, "backend": "gloo"}
    recipe = Recipe.named("smollm2-135m-lora").changed({"batch_size": 4, "gradient_accumulation": 3, "distributed": shape})
    incidents = RecoveryLog(entries=(OutOfMemory(step=1, batch_size=2, gradient_accumulation=12),))
    for processes, accumulation in ((1, 12), (2, 6), (3, 4), (6, 2)):
        fitted = incidents.shrink_recipe(recipe.for_processes(processes))
        assert (fitted.batch_size, fitted.gradient_accumulation, fitted.samples_per_step) == (2, accumulation, 24)
