"""Recovery events of a run: the step each applies from, and their replay."""

from recipes.contracts.recovery_log import (
    Diverged,
    NotCompiled,
    NotDeterministic,
    OutOfMemory,
    RecoveryLog,
    find_final_divergences,
)

HALVED = OutOfMemory(step=11, batch_size=4, gradient_accumulation=2)
HALVED_AGAIN = OutOfMemory(step=21, batch_size=2, gradient_accumulation=4)
SKIPPED = Diverged(step=30, noticed=31, reason="r", rolled_back_to=15, skipped=(232, 248))
ENDED = Diverged(step=40, noticed=41, reason="r", rolled_back_to=35)


def after(incidents: RecoveryLog) -> list[int | None]:
    return [entry.after for entry in incidents.out_of_memory]


def test_recovery_log_separates_event_kinds() -> None:
    all_but_one = RecoveryLog(entries=(HALVED, SKIPPED, ENDED))
    assert all_but_one.not_deterministic == [], "nothing else makes a run compute otherwise each time"
    assert all_but_one.not_compiled == []
    assert find_final_divergences(all_but_one.entries) == [ENDED]
    assert all_but_one.skipped == ((232, 248),)
    assert all_but_one.repeated_steps == ((range(29, 32), None),), "with the update before the first bad loss"


def test_smaller_micro_batches_apply_from_the_resume_or_rollback_step() -> None:
    run = RecoveryLog().with_event(HALVED).resume_after(10).with_event(HALVED_AGAIN).resume_after(20)
    assert after(run) == [10, 20]
    back = run.with_event(SKIPPED).resume_after(15)
    assert after(back) == [10, 15]
    assert back.with_event(SKIPPED) == back.resume_after(30) == back


def test_replay_skips_samples_at_once_and_shrinks_batches_at_recorded_steps() -> None:
    first = RecoveryLog().with_event(HALVED).resume_after(10).with_event(SKIPPED).resume_after(15).with_event(ENDED)
    assert RecoveryLog().replay_events(first.entries, 0).entries == (SKIPPED,)
    repeated = RecoveryLog().replay_events(first.entries, 10)
    assert repeated.entries == first.entries[:2]
    own = repeated.with_event(HALVED_AGAIN).resume_after(12)
    assert own.replay_events(first.entries, 12) == own
    # The newest checkpoints are lost: the steps before the eleventh run with the larger micro-batches again.
    assert own.replay_events(first.entries, 8).entries == (SKIPPED, own.entries[-1])
    assert own.without(first.entries).repeated_steps == ()


def test_replay_omits_machine_specific_events() -> None:
    refused = NotDeterministic(step=1, operation="index_fold_cuda_")
    failed = NotCompiled(step=1, reason="PassManager::run failed")
    first = RecoveryLog().with_event(refused).with_event(failed).resume_after(10)
    assert first.not_deterministic == [refused]
    assert first.not_compiled == [failed]
    assert RecoveryLog().replay_events(first.entries, 10).entries == ()
    assert first.replay_events(first.entries, 10) == first
