"""The program convert: merge an adapter, or take full weights, and export safetensors and GGUF.

Running it again gives the same digests, even after a kill at any moment: times are in the result's facts only.
"""

import shutil
import time
from pathlib import Path

from recipes.startup import prepare_imports

if __name__ == "__main__":
    prepare_imports()

from pydantic import JsonValue, ValidationError

from recipes.contracts.job import BadConfiguration, Job, Result
from recipes.contracts.parameters import ConvertParameters, TokenizeParameters
from recipes.contracts.results import TRAINED_ROLES, find_trained_role
from recipes.contracts.validation_errors import explain_first_error
from recipes.export.chat_templates import read_chat_templates, unserved_names
from recipes.export.engine_probe import check_engine
from recipes.export.gguf import export_gguf
from recipes.export.merge import cast_weights, merge_adapter
from recipes.runner import log_line, main
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact

GGUF_FILE = "model.gguf"


def convert(job: Job, store: Store, work: Path) -> Result:
    """Merge an adapter into its base, or cast trained weights, and export.

    Inputs: `base`, and `adapter` or `weights`. Outputs: `merged`, `gguf`.

    Raises:
        BadConfiguration: an input, output or parameter is missing or wrong, or the merged model's logits deviate.
        BrokenArtifact: an input does not match the checksums in its manifest.
    """
    parameters = read_parameters(job)
    role = find_trained_role(job.inputs)
    trained, base = job.inputs[role], job.inputs["base"]
    dtype = parameters.recipe.computing_dtype
    started = time.monotonic()
    log_line(f"checking the checksums of {role} and base")
    trained_folder = store.fetch(trained, Path(job.cache_dir))
    base_folder = store.fetch(base, Path(job.cache_dir))
    fetched = time.monotonic()

    log_line(f"{'merging the adapter in float32' if role == 'adapter' else 'checking the weights'}, storing {dtype}")
    agreement = (merge_adapter if role == "adapter" else cast_weights)(base_folder, trained_folder, work / "merged", dtype)
    lineage = {role: trained.digest, "base": base.digest}
    merged = store.publish(work / "merged", job.outputs["merged"], "merged", inputs=lineage)
    merge_ended = time.monotonic()

    log_line(f"exporting GGUF {parameters.quantization}")
    gguf, notes = publish_gguf(job, store, work, merged, parameters)
    return Result(
        work_digest=job.work_digest,
        artifacts={"merged": merged, "gguf": gguf},
        facts={
            "logit_error_merged": agreement.merged,
            "logit_error_stored": agreement.stored,
            "seconds_fetch": fetched - started,
            "seconds_merge": merge_ended - fetched,
            "seconds_export": time.monotonic() - merge_ended,
            **({"notes": list(notes)} if notes else {}),
        },
    )


def publish_gguf(
    job: Job, store: Store, work: Path, merged: Artifact, parameters: ConvertParameters
) -> tuple[Artifact, list[str]]:
    """Export the merged folder as a GGUF artifact. Returns it with notes for users.

    Raises:
        BadConfiguration: it cannot be exported, or the engine would tokenize or render differently from training.
    """
    folder = work / "gguf"
    if folder.exists():
        shutil.rmtree(folder)  # left by a killed run
    prompt, arguments = parameters.recipe.system_prompt, parameters.template_arguments
    export_gguf(work / "merged", folder / GGUF_FILE, parameters.quantization, prompt, arguments)
    log_line("comparing the engine's tokens and chat templates with those of training")
    trained = TokenizeParameters(tokenizer="merged", system_prompt=prompt, template_arguments=arguments)
    notes = [
        f"may differ from training: {note}"
        for note in check_engine(work / "merged", folder / GGUF_FILE, trained, job.rendering)
    ]
    if unserved := unserved_names(read_chat_templates(work / "merged")):
        notes.append(f"the engine does not render the chat templates {', '.join(unserved)}")
    for note in notes:
        log_line(note)
    facts: dict[str, JsonValue] = {"quantization": parameters.quantization}
    if prompt is not None:
        facts["system_prompt"] = prompt
    if arguments:
        facts["template_arguments"] = arguments
    return store.publish(folder, job.outputs["gguf"], "gguf", inputs={"merged": merged.digest}, facts=facts), notes


def read_parameters(job: Job) -> ConvertParameters:
    """Check a job's inputs and outputs, and return its parameters."""
    for kind, roles, provided in (("input", ("base",), job.inputs), ("output", ("merged", "gguf"), job.outputs)):
        for role in roles:
            if role not in provided:
                raise BadConfiguration(f"job {job.id}: the {kind} '{role}' is missing, convert needs {' and '.join(roles)}")
    if not any(role in job.inputs for role in TRAINED_ROLES):
        raise BadConfiguration(f"job {job.id}: convert needs one input of {' or '.join(TRAINED_ROLES)}")
    try:
        return ConvertParameters.model_validate(job.parameters)
    except ValidationError as error:
        raise BadConfiguration(f"job {job.id}: parameters: {explain_first_error(error, ConvertParameters)}") from None


if __name__ == "__main__":
    main(convert)
