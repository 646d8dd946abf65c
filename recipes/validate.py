"""The program validate: check a dataset version's records against its contract, and compute statistics.

The statistics are an artifact of the version. The input `reference` is another version's, for measuring drift.
"""

from collections.abc import Iterable
from pathlib import Path

from recipes.contracts.dataset_contract import ValidateParameters
from recipes.contracts.job import BadConfiguration, Job, Result
from recipes.contracts.quantities import pluralize
from recipes.contracts.validation_results import STATISTICS_FILE, Statistics, ValidationFacts, Violations
from recipes.preparation.source import Source
from recipes.runner import log_line, main
from recipes.storage.artifact_store import Store
from recipes.validation.dataset_statistics import StatisticsCollector
from recipes.validation.drift import compare_versions
from recipes.validation.record_blocks import iterate_blocks


def validate(job: Job, store: Store, work: Path) -> Result:
    """Validate. Inputs: `dataset`, optionally `reference`. Output: `statistics`.

    The facts are `ValidationFacts`.
    """
    parameters = ValidateParameters.model_validate(job.parameters)
    source = job.inputs["dataset"]
    records = store.manifest(source).facts.get("num_records")
    if not isinstance(records, int):
        raise BadConfiguration(f"{source.uri} does not say how many records it has: make the version again")
    lines = Source(store, source, Path(job.cache_dir)).lines()
    statistics, violations = validate_records(lines, parameters, records, work)
    log_line(f"{pluralize(statistics.records, 'record')}, {pluralize(violations.count, 'violation')} of the contract")
    folder = work / "statistics"
    folder.mkdir(exist_ok=True)
    (folder / STATISTICS_FILE).write_text(statistics.model_dump_json(indent=None), encoding="utf-8")
    artifact = store.publish(folder, job.outputs["statistics"], "statistics", inputs={"dataset": source.digest})
    reference = job.inputs.get("reference")
    drift = None
    if reference is not None:
        drift = compare_versions(
            parameters.reference, read_statistics(store.get_bytes(f"{reference.uri}/{STATISTICS_FILE}")), statistics
        )
    facts = ValidationFacts(violations=violations, drift=drift)
    return Result(work_digest=job.work_digest, artifacts={"statistics": artifact}, facts=facts.model_dump(mode="json"))


def validate_records(
    lines: Iterable[bytes], parameters: ValidateParameters, records: int, scratch: Path
) -> tuple[Statistics, Violations]:
    """Check and describe all records in one pass."""
    description = StatisticsCollector(parameters.measures, records, scratch)
    if not parameters.contract.has_rules:
        for block in iterate_blocks(lines):
            description.add(block)
        return description.statistics(), Violations()
    from recipes.validation.contract_check import ContractChecker  # pandera takes a second to import

    conformance = ContractChecker(parameters.contract)
    for block in iterate_blocks(lines):
        description.add(block)
        conformance.add(block)
    return description.statistics(), conformance.violations()


def read_statistics(document: bytes) -> Statistics:
    return Statistics.model_validate_json(document)


if __name__ == "__main__":
    main(validate)
