"""Stall detection: no rank progresses within the limit, and the culprit rank is named."""

from recipes.launch.rank_progress import RankProgress
from recipes.launch.stall_watch import SILENT_SECONDS, StallWatch, find_culprits

LIMIT = 60.0
WAITING = RankProgress(events=7, collectives={"all": 41, "node": 9})
HANGING = RankProgress(events=7, collectives={"all": 40, "node": 9})


def watch_for(watch: StallWatch, seconds: int, *, since: int = 0) -> dict[int, list[int]] | None:
    found = None
    for now in range(since, since + seconds + 1, 5):
        found = watch.find_stalled(float(now))
    return found


def test_stall_is_found_after_the_limit_and_names_the_culprit() -> None:
    watch = StallWatch(LIMIT)
    watch.report(0, {0: WAITING, 1: WAITING})
    watch.report(1, {2: WAITING, 3: HANGING})
    assert watch_for(watch, 55) is None
    assert watch_for(watch, 10, since=55) == {1: [3]}


def test_progress_of_one_rank_resets_the_limit() -> None:
    watch = StallWatch(LIMIT)
    watch.report(0, {0: HANGING})
    watch_for(watch, 55)
    watch.report(0, {0: WAITING})
    assert watch_for(watch, 50, since=55) is None


def test_program_that_does_not_train_has_no_limit() -> None:
    watch = StallWatch(LIMIT)
    watch.report(0, {})
    assert watch_for(watch, 600) is None
    watch.report(0, {0: WAITING})
    assert watch_for(watch, 30, since=605) is None


def test_time_while_the_machine_was_suspended_does_not_count() -> None:
    watch = StallWatch(LIMIT)
    watch.report(0, {0: WAITING})
    assert watch.find_stalled(0.0) is None
    assert watch.find_stalled(36_000.0) is None


def test_rank_waited_for_indirectly_is_the_culprit() -> None:
    """Rank 0 waits for rank 1, which waits for rank 2."""
    ranks = {
        0: RankProgress(events=1, collectives={"rows": 5}),
        1: RankProgress(events=1, collectives={"rows": 4, "columns": 8}),
        2: RankProgress(events=1, collectives={"columns": 7}),
    }
    assert find_culprits(ranks) == {2}


def test_silent_rank_is_the_culprit_where_all_have_begun_the_same_exchange() -> None:
    silent = WAITING.model_copy(update={"silent_seconds": SILENT_SECONDS + 1})
    assert find_culprits({0: WAITING, 1: silent}) == {1}
    assert find_culprits({0: WAITING, 1: WAITING}) == {0, 1}


def test_silent_rank_is_the_culprit_although_it_is_ahead_of_those_that_wait_for_it() -> None:
    silent = WAITING.model_copy(update={"silent_seconds": SILENT_SECONDS + 1})
    assert find_culprits({0: HANGING, 1: silent}) == {1}
