"""`exit.json`: the stored reason decides; documents of older releases without one are still classified."""

import json

import pytest
from pydantic import ValidationError

from recipes.contracts.exit_reason import ExitDocument, ExitReason, classify_exception_name


def read(**document: object) -> ExitDocument:
    return ExitDocument.model_validate_json(json.dumps(document))


@pytest.mark.parametrize("reason", ExitReason)
def test_exit_reason_takes_precedence_over_the_message(reason: ExitReason) -> None:
    for message in ("killed", "starting again: the object store refuses: no", "no space left", "CUDA out of memory", ""):
        assert read(code=1, message=message, reason=reason).reason is reason


def test_exit_document_round_trips_through_json() -> None:
    document = ExitDocument(code=None, message="killed", reason=ExitReason.KILLED)
    assert ExitDocument.model_validate_json(document.model_dump_json()) == document


@pytest.mark.parametrize(
    ("code", "message", "reason"),
    [
        (78, "unknown recipe: correct it", ExitReason.BAD_CONFIGURATION),
        (78, "CUDA out of memory", ExitReason.BAD_CONFIGURATION),
        (143, "preempted: checkpoint 3 holds everything", ExitReason.PREEMPTED),
        (75, "starting again: on with half the batch", ExitReason.RESTART_REQUESTED),
        (75, "starting again: the command was killed (SIGKILL)", ExitReason.RESTART_REQUESTED),
        (75, "starting again: the object store is away: model is missing", ExitReason.STORAGE_UNAVAILABLE),
        (75, "starting again: the object store gives no answer, or refuses: x", ExitReason.STORAGE_UNAVAILABLE),
        (75, "starting again: the object store refuses: s3://x: no bucket", ExitReason.STORAGE_DENIED),
        (1, "no space left for /scratch/state.pt: free some space, then retry", ExitReason.STORAGE_FULL),
        (1, "ValueError: there is no space left in the line", ExitReason.PROGRAM_ERROR),
        (1, "torch.OutOfMemoryError: CUDA out of memory", ExitReason.OUT_OF_MEMORY),
        (1, "MemoryError: no 9 GB", ExitReason.OUT_OF_MEMORY),
        (1, "the file system of /w is read-only, as the kernel makes one", ExitReason.PROGRAM_ERROR),
        (1, "ValueError: the answer was killed by a filter", ExitReason.PROGRAM_ERROR),
        (1, "KeyError: 'x'", ExitReason.PROGRAM_ERROR),
        (137, "the container was ended", ExitReason.KILLED),
        (None, "it ended by itself", ExitReason.UNKNOWN),
    ],
)
def test_a_document_without_a_reason_is_classified_by_its_code_and_message(
    code: int | None, message: str, reason: ExitReason
) -> None:
    assert read(code=code, message=message).reason is reason
    assert read(code=code, message=message, reason=None).reason is reason
    assert read(code=code, message=message, reason="of_a_newer_release").reason is reason


@pytest.mark.parametrize("document", [{}, {"code": 1}, {"message": "x"}, {"code": "x", "message": "x"}])
def test_invalid_exit_document_is_refused(document: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        read(**document)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("StoreUnavailable", ExitReason.STORAGE_UNAVAILABLE),
        ("NoStore", ExitReason.STORAGE_UNAVAILABLE),
        ("StoreFull", ExitReason.STORAGE_FULL),
        ("StoreRefuses", ExitReason.STORAGE_DENIED),
        ("RefusedByStore", ExitReason.STORAGE_DENIED),
        ("OperationalError", ExitReason.DATABASE_UNAVAILABLE),
        ("InterfaceError", ExitReason.DATABASE_UNAVAILABLE),
        ("DagsterPostgresException", ExitReason.DATABASE_UNAVAILABLE),
        ("TimeoutError", ExitReason.SUPERVISOR_FAILED),
        ("MemoryError", ExitReason.SUPERVISOR_FAILED),
        ("MachineFailed", ExitReason.KILLED),
        ("BadConfiguration", ExitReason.BAD_CONFIGURATION),
        ("JobFailed", ExitReason.PROGRAM_ERROR),
        ("KeyError", ExitReason.PROGRAM_ERROR),
    ],
)
def test_exit_without_reason_is_classified_by_exception_class(name: str, reason: ExitReason) -> None:
    assert classify_exception_name(name) is reason
