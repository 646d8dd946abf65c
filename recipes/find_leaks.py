"""The program find_leaks: search the training data of all ancestors for a test split's records.

All leaks are in the artifact `leaks`, as JSON lines; the result lists the first few. The test split is downloaded, because
it is read repeatedly; training data, which may be large, is streamed once.
"""

from collections import Counter
from pathlib import Path

from recipes.contracts.dataset_contract import FindLeaksParameters
from recipes.contracts.job import Job, Result
from recipes.contracts.quantities import pluralize
from recipes.contracts.validation_results import MAX_NAMED_RECORDS, Leak, Leaks
from recipes.records.record_reader import iterate_record_lines
from recipes.runner import log_line, main
from recipes.storage.artifact_store import Store
from recipes.validation.leakage import HeldOutIndex

TEST_INPUT = "test"
MATCH_STRENGTHS = ("none", "near", "exact")


def find_leaks(job: Job, store: Store, work: Path) -> Result:
    """Find leaks. Inputs: `test`, and each ancestor's training records.

    Output: `leaks`. The facts are `Leaks`.
    """
    parameters = FindLeaksParameters.model_validate(job.parameters)
    test, place = job.inputs[TEST_INPUT], store.fetch(job.inputs[TEST_INPUT], Path(job.cache_dir))
    tested_files = sorted(place / file.path for file in store.manifest(test).files if file.path.endswith(".jsonl"))
    ancestors = {role: source for role, source in sorted(job.inputs.items()) if role != TEST_INPUT}
    folder = work / "leaks"
    folder.mkdir(exist_ok=True)
    by_ancestor: Counter[str] = Counter()
    first: list[Leak] = []
    with (
        HeldOutIndex(tested_files, parameters.near) as tested,
        (folder / "leaks.jsonl").open("w", encoding="utf-8") as out,
    ):
        matches = bytearray(len(tested))  # the strongest match of each test record
        for role, source in ancestors.items():
            ancestor = parameters.names.get(role, role)
            for leak in tested.leaks(iterate_record_lines(store, source), ancestor):
                out.write(leak.model_dump_json() + "\n")
                by_ancestor[ancestor] += 1
                matches[leak.line - 1] = max(matches[leak.line - 1], MATCH_STRENGTHS.index(leak.match))
                if len(first) < MAX_NAMED_RECORDS:
                    first.append(leak)
    exact, near = (matches.count(MATCH_STRENGTHS.index(match)) for match in ("exact", "near"))
    log_line(
        f"of {pluralize(len(matches), 'test record')}, found in an ancestor's training records: {exact}, nearly: {near}"
    )
    inputs = {role: source.digest for role, source in job.inputs.items()}
    artifact = store.publish(folder, job.outputs["leaks"], "leaks", inputs=inputs)
    leaks = Leaks(
        tested=len(matches),
        searched=len(ancestors),
        exact=exact,
        near=near,
        by_ancestor=dict(by_ancestor),
        first=tuple(first),
    )
    return Result(work_digest=job.work_digest, artifacts={"leaks": artifact}, facts=leaks.model_dump(mode="json"))


if __name__ == "__main__":
    main(find_leaks)
