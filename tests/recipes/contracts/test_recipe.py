"""The specification's recipes value by value, and every reason to refuse a recipe."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes.contracts.job import BadConfiguration
from recipes.contracts.recipe import RECIPES_FOLDER, Recipe
from recipes.planning.recipe_checks import check_supported, unsupported_reason

SPECIFICATION = """
zen-7b-lora:
  gpu_requirement: "1x A100 40GB"
  base_dtype: float16
  lora_rank: 64
  lora_alpha: 128
  lora_target_modules: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
  learning_rate: 2e-4
  batch_size: 4
  gradient_accumulation: 4
  max_steps: 10000
  estimated_time: "4 hours"
  estimated_cost: "$20"
zen-72b-lora:
  gpu_requirement: "4x A100 80GB"
  base_dtype: float16
  lora_rank: 64
  lora_alpha: 128
  lora_target_modules: ["q_proj", "k_proj", "v_proj", "o_proj"]
  learning_rate: 1e-4
  batch_size: 1
  gradient_accumulation: 16
  max_steps: 5000
  distributed:
    strategy: fsdp
    num_nodes: 1
    gpus_per_node: 4
  estimated_time: "12 hours"
  estimated_cost: "$200"
zen-72b-qlora:
  gpu_requirement: "1x A100 80GB"
  base_dtype: nf4
  compute_dtype: bfloat16
  lora_rank: 64
  lora_alpha: 128
  lora_target_modules: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
  learning_rate: 2e-5
  batch_size: 2
  gradient_accumulation: 8
  max_steps: 5000
  double_quant: true
  estimated_time: "24 hours"
  estimated_cost: "$100"
zen-7b-full:
  gpu_requirement: "8x A100 80GB"
  dtype: bfloat16
  optimizer: adamw
  learning_rate: 2e-5
  batch_size: 4
  gradient_accumulation: 4
  max_steps: 50000
  distributed:
    strategy: fsdp
    sharding: full_shard
    num_nodes: 1
    gpus_per_node: 8
  estimated_time: "48 hours"
  estimated_cost: "$1,600"
zen-72b-full:
  gpu_requirement: "32x A100 80GB"
  dtype: bfloat16
  optimizer: adamw
  learning_rate: 5e-6
  batch_size: 1
  gradient_accumulation: 32
  max_steps: 20000
  distributed:
    strategy: fsdp
    sharding: full_shard
    num_nodes: 4
    gpus_per_node: 8
  estimated_time: "7 days"
  estimated_cost: "$22,400"
"""
METHODS = {
    "lora": (
        "Low-Rank Adaptation -- adds small trainable matrices to attention layers",
        "Base model (frozen, loaded in inference dtype) + adapter weights + optimizer states",
        "Single-GPU fine-tuning, domain adaptation, instruction tuning",
    ),
    "qlora": (
        "Quantized LoRA -- base model loaded in 4-bit, adapters in FP16",
        "75% less than LoRA (base weights in NF4 instead of FP16)",
        "Fine-tuning large models on limited GPU memory",
    ),
    "full": (
        "All model weights are trainable -- highest quality, highest cost",
        "Model weights + gradients + optimizer states (3-4x model size)",
        "Significant domain shift, pre-training continuation, large data",
    ),
}


@pytest.mark.requirement("L1", "L2", "L3", "L4", "L5", "L6", "Z25")
@pytest.mark.parametrize("name", yaml.safe_load(SPECIFICATION))
def test_zen_recipe_matches_the_specification_value_by_value(name: str) -> None:
    written = yaml.safe_load(SPECIFICATION)[name]
    read = Recipe.named(name).model_dump(mode="json")
    shape = written.pop("distributed", None)
    assert read | {"learning_rate": None} == read | written | {"learning_rate": None}
    assert read["learning_rate"] == float(written["learning_rate"])  # YAML reads 2e-4 as a string
    assert shape is None or shape.items() <= read["distributed"].items()
    size, method = name.removeprefix("zen-").split("-")
    assert (read["method"], read["objective"], read["base_model"]["uri"]) == (method, "sft", f"zenlm/zen-{size}")
    assert (read["description"], read["memory_profile"], read["when_to_use"]) == METHODS[method]


def test_recipe_round_trips_through_json() -> None:
    for name in Recipe.names():
        recipe = Recipe.named(name)
        assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


SMALL = (RECIPES_FOLDER / "smollm2-135m-lora.yaml").read_text()


def refusal(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    with pytest.raises(BadConfiguration) as caught:
        Recipe.load(path)
    message = str(caught.value)
    assert message.startswith(str(path)) and "\n" not in message
    return message


@pytest.mark.parametrize(
    ("line", "instead", "named"),
    [
        ("lora_rank: 16", "lora_rank: 0", "'lora_rank'"),
        ("seed: 42", "sead: 42", "'sead'"),
        ("hardware: {gpus: 0, cpu: 2, memory: 4Gi}", "hardware: {gpu: 0}", "'hardware.gpu'"),
        ("seed: 42", "hardware:\n  gpus: 0\n  gpu_typ: x", "'hardware' is a duplicate"),
        ("max_steps: 90", "max_steps: 1e3", "'max_steps'"),
        ("seed: 42", "yes: 42", "the key `yes` is not a text in YAML: put it in quotes"),
        ("seed: 42", "~: 42", "the key `~` is not a text in YAML"),
        ("hardware: {gpus: 0, cpu: 2, memory: 4Gi}", "hardware: {gpus: 0, null: 2}", "the key `null` is not a text in YAML"),
        ("seed: 42", "2026-01-01: 42", "the key `2026-01-01` is not a text in YAML"),
        ("seed: 42", "seed: -1", "'seed'"),
        ("seed: 42", "seed: 4294967296", "'seed'"),
        ("hardware: {gpus: 0, cpu: 2, memory: 4Gi}", "hardware: {gpus: -8}", "'hardware.gpus'"),
        ("hardware: {gpus: 0, cpu: 2, memory: 4Gi}", "hardware: {cpu: -1}", "'hardware.cpu'"),
        ("hardware: {gpus: 0, cpu: 2, memory: 4Gi}", "hardware: {cpu: 9999}", "'hardware.cpu'"),
        ("max_steps: 90", "max_steps: 9999999999", "'max_steps'"),
        ("sequence_length: 512", "sequence_length: 99999999999", "'sequence_length'"),
        ("lora_alpha: 32", "lora_alpha: 99999999999", "'lora_alpha'"),
        ("learning_rate: 1.0e-3", "learning_rate: .inf", "'learning_rate': Input should be a finite number"),
        ("learning_rate: 1.0e-3", "learning_rate: 1e400", "'learning_rate': Input should be a finite number"),
        ("seed: 42", "weight_decay: .inf", "'weight_decay': Input should be a finite number"),
        ("seed: 42", "max_grad_norm: .inf", "'max_grad_norm': Input should be a finite number"),
        (
            "checkpoint: {interval: 1h, interval_steps: 20, keep_last: 3}",
            "checkpoint: {keep_last: 9999999}",
            "'checkpoint.keep_last'",
        ),
        (
            "hardware: {gpus: 0, cpu: 2, memory: 4Gi}",
            "hardware: {gpus: yes}",
            "'hardware.gpus': must be a number: YAML reads",
        ),
        (
            "checkpoint: {interval: 1h, interval_steps: 20, keep_last: 3}",
            "checkpoint: {interval: 0s}",
            "checkpoint.interval is 0s, but must be positive: set a duration such as 20m, or remove the key",
        ),
        (
            "checkpoint: {interval: 1h, interval_steps: 20, keep_last: 3}",
            "checkpoint: {resume_from: on}",
            "must be a number",
        ),
        ("seed: 42", "distributed: {num_nodes: on}", "'distributed.num_nodes': must be a number"),
        ("hardware: {gpus: 0, cpu: 2, memory: 4Gi}", "hardware: {memory: 64GB}", "memory '64GB' is not a quantity: write a"),
        ("hardware: {gpus: 0, cpu: 2, memory: 4Gi}", "hardware:", "'hardware': must be a mapping of keys to values"),
        ('estimated_cost: "$0"', "estimated_cost: 0", "'estimated_cost': must be a text: put it in quotes"),
        ("method: lora", "method: lora\narchitecture: {model_type: llama}", "'architecture.hidden_size' is missing: add it"),
        (
            "lora_target_modules: [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]",
            "lora_target_modules: q_proj",
            "'lora_target_modules': must be a list",
        ),
        (
            "lora_target_modules: [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]",
            "lora_target_modules: [q_proj, v_proj, q_proj]",
            "'q_proj' is listed twice: keep one of them",
        ),
        ("seed: 42", "gpu_requirement: 2x A100 80GB", "hardware and distributed make none: make them agree"),
        ("seed: 42", "gpu_requirement: two", "'gpu_requirement': write it as '8x A100 80GB'"),
        # Conflicts between two keys are reported at the first key that the message names.
        ("seed: 42", "rows_per_step: 100", "rows_per_step is 100"),
        ("max_steps: 90", "max_steps: 90\nbeta: 0.1", "beta is a key of the preference objectives"),
    ],
)
def test_a_refusal_names_file_line_and_key(tmp_path: Path, line: str, instead: str, named: str) -> None:
    message = refusal(tmp_path, SMALL.replace(line, instead))
    place = SMALL.splitlines().index(line) + 1
    if "a duplicate" in named:
        place = SMALL.replace(line, instead).splitlines().index("hardware: {gpus: 0, cpu: 2, memory: 4Gi}") + 1
    if "\n" in instead and "a duplicate" not in named:
        place += 1
    assert f"line {place}: " in message
    assert named in message


def test_conflict_of_nested_keys_is_reported_at_the_first_key(tmp_path: Path) -> None:
    shape = "hardware:\n  cpu: 2\n  gpus: 3\ndistributed: {gpus_per_node: 2}"
    text = SMALL.replace("hardware: {gpus: 0, cpu: 2, memory: 4Gi}", shape)
    assert f"line {text.splitlines().index('  gpus: 3') + 1}: " in refusal(tmp_path, text)
    text = SMALL.replace("{interval: 1h, interval_steps: 20, keep_last: 3}", "\n  keep_last: 3\n  interval: 0.0h")
    assert f"line {text.splitlines().index('  interval: 0.0h') + 1}: checkpoint.interval is 0.0h" in refusal(tmp_path, text)


@pytest.mark.requirement("I1")
def test_checkpoint_block_of_the_specification_is_accepted(tmp_path: Path) -> None:
    """`storage` is informational: it must name the actual location."""
    block = {
        "storage": "s3://hanzo-ml/checkpoints/{run_id}/",
        "interval": "1h",
        "keep_last": 3,
        "save_on_preempt": True,
        "resume_from": "latest",
    }
    recipe = Recipe.named("smollm2-135m-lora")
    assert recipe.changed({"checkpoint": block}).model_dump() == recipe.changed({"checkpoint": {}}).model_dump()
    with pytest.raises(BadConfiguration, match=r"'checkpoint.storage'.*s3://hanzo-ml/checkpoints/\{run_id\}/"):
        recipe.changed({"checkpoint": {"storage": "s3://elsewhere/"}})


def test_error_line_is_that_of_the_nested_key(tmp_path: Path) -> None:
    text = SMALL.replace("seed: 42\n", "distributed:\n  strategy: ddp\n  num_nodes: 0\n")
    assert f"line {text.splitlines().index('  num_nodes: 0') + 1}: 'distributed.num_nodes'" in refusal(tmp_path, text)


def test_missing_key_is_refused_by_name_only(tmp_path: Path) -> None:
    """Regression: the message ended with a Python dump of the whole recipe."""
    message = refusal(tmp_path, SMALL.replace("learning_rate: 1.0e-3\n", ""))
    assert message.endswith("mine.yaml: 'learning_rate' is missing: add it")


def test_misspelled_key_is_refused_with_its_line_and_suggestion(tmp_path: Path) -> None:
    text = SMALL.replace("learning_rate:", "learning_rat:")
    place = next(number for number, line in enumerate(text.splitlines(), 1) if line.startswith("learning_rat:"))
    assert refusal(tmp_path, text).endswith(
        f"mine.yaml, line {place}: unknown key 'learning_rat': did you mean 'learning_rate'?"
    )


@pytest.mark.parametrize(
    ("line", "instead", "place", "words"),
    [
        ("base_model:\n  uri", "base_model:\n\turi", 6, "found character '\\t' that cannot start any token: use spaces"),
        ("seed: 42", "seed: 2026-13-41", 21, "month must be in 1..12"),
        ("seed: 42", f"seed: {'9' * 5000}", 21, "Exceeds the limit (4300 digits) for integer string conversion: "),
        ("seed: 42", "seed: *s", 21, "found undefined alias 's'"),
        ("seed: 42", "seed: \0", 21, "the character #x0000 is not allowed"),
        ("seed: 42", "---", 21, "but found another document"),
        ("seed: 42", f"seed: {'[' * 3000}", None, "it is nested too deep"),
    ],
)
def test_invalid_yaml_is_refused_with_the_line(
    tmp_path: Path, line: str, instead: str, place: int | None, words: str
) -> None:
    """Regression: invalid dates had no line number, long numbers showed Python's advice for programmers."""
    message = refusal(tmp_path, SMALL.replace(line, instead))
    assert f"mine.yaml{f', line {place}' if place else ''} is not valid YAML: {words}" in message
    assert "unicode string" not in message and "sys." not in message


@pytest.mark.parametrize("text", ["Be kind.\\0", "half: \\ud800"])
def test_text_with_unstorable_characters_is_refused_at_its_key(tmp_path: Path, text: str) -> None:
    """Regression: YAML accepts escaped characters that databases refuse, so the recipe counted as valid."""
    message = refusal(tmp_path, f'{SMALL}system_prompt: "{text}"\n')
    assert "'system_prompt': system_prompt contains a character that cannot be stored" in message
    with pytest.raises(BadConfiguration, match=r"lora_target_modules\[0\] contains a character that cannot be stored"):
        Recipe.named("smollm2-135m-lora").changed({"lora_target_modules": ["q\0"]})


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "is empty"), ("# nothing\n", "is empty"), ("hello\n", "must be a mapping"), ("- a\n", "must be a mapping")],
)
def test_file_without_keys_is_refused_with_a_hint(tmp_path: Path, text: str, words: str) -> None:
    assert refusal(tmp_path, text).endswith(f"{words}: write lines of `KEY: VALUE`, as `hanzo-ml recipe show` prints them")


def test_non_utf_8_bytes_are_refused_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(SMALL.replace("LoRA on", "L\u00f6RA on").encode("latin-1"))
    with pytest.raises(BadConfiguration, match=r"mine.yaml, line 2 is not UTF-8: save it as UTF-8"):
        Recipe.load(path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"method": "full", "dtype": "bfloat16", "lora_rank": 8}, "lora_rank"),
        ({"objective": "reinforce"}, "use sft, dpo, orpo"),
        ({"beta": 0.2}, "beta is a key of the preference objectives"),
        ({"max_steps": True}, "'max_steps': must be a number: YAML reads yes, on and true as true"),
        ({"eval_steps": False}, "'eval_steps': must be a number"),
        ({"learning_rate": True}, "'learning_rate': must be a number"),
        ({"hardware": {"gpus": True}}, "'hardware.gpus': must be a number"),
        ({"method": "full", "lora_target_modules": [], "lora_rank": 16, "lora_alpha": 32}, "needs dtype"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"lora_target_modules": []}, "needs lora_target_modules"),
        ({"method": "qlora"}, "nf4"),
        ({"base_dtype": "nf4"}, "nf4"),
        ({"method": "qlora", "base_dtype": "nf4"}, "compute_dtype"),
        ({"double_quant": True}, "double_quant"),
        ({"gpu_requirement": "eight A100"}, "8x A100 80GB"),
        ({"gpu_requirement": "2x A100 80GB"}, "agree"),
        ({"hardware": {"gpus": 4}, "distributed": {"num_nodes": 1, "gpus_per_node": 8}}, "make them equal"),
    ],
)
def test_contradictory_keys_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(BadConfiguration, match=named) as caught:
        Recipe.named("smollm2-135m-lora").changed(changes)
    assert "\n" not in str(caught.value)


def test_changed_hardware_removes_the_gpu_requirement() -> None:
    changed = Recipe.named("zen-7b-lora").changed({"hardware": {"gpus": 1, "gpu_type": "nvidia-h100-80gb"}})
    assert changed.gpu_requirement is None


@pytest.mark.requirement("Z24")
def test_gpus_are_counted_for_each_node() -> None:
    """`resources.gpus: 8` with `num_nodes: 4` are 32."""
    recipe = Recipe.named("zen-72b-full")
    assert (recipe.hardware.gpus, recipe.processes) == (8, 32)
    assert recipe.tokens_per_step == 1 * 32 * 32 * recipe.sequence_length


def test_changing_the_method_drops_keys_of_the_old_one() -> None:
    lora = Recipe.named("smollm2-135m-lora")
    full = lora.changed({"method": "full", "dtype": "float32"})
    assert (full.method, full.lora_target_modules) == ("full", ())
    assert full.changed({"method": "lora", "lora_target_modules": ["q_proj"]}).dtype is None


QLORA = {"method": "qlora", "base_dtype": "nf4", "compute_dtype": "bfloat16"}
ZERO = {"distributed": {"strategy": "deepspeed_zero3"}, "hardware": {"cpu": 8}}
PINNED = {"base_model": {"uri": "file:///x", "sha256": "0" * 64}}


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("zen-7b-lora", {}, "not pinned"),
        ("zen-7b-full", PINNED | ZERO | {"optimizer": "adamw_8bit"}, "not adamw_8bit: use optimizer adamw"),
        ("zen-72b-lora", PINNED | ZERO | QLORA, "deepspeed_zero3 does not support weights in NF4"),
        ("zen-72b-lora", PINNED | QLORA, "fsdp does not shard weights in NF4"),
        (
            "zen-7b-lora",
            PINNED | {"hardware": {"gpus": 8, "gpu_type": "nvidia-a100-80gb"}},
            "hardware.gpus is 8, and without distributed one process trains on one of them: add distributed: .*, or use 1",
        ),
        ("zen-7b-full", PINNED | {"optimizer": "adamw_8bit"}, "fsdp does not shard the moments of adamw_8bit"),
    ],
)
def test_unsupported_recipe_is_refused_in_one_line(name: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(BadConfiguration, match=named) as caught:
        check_supported(Recipe.named(name).changed(changes))
    assert "\n" not in str(caught.value)


def test_supported_recipes_are_accepted() -> None:
    assert unsupported_reason(Recipe.named("smollm2-135m-lora")) is None
    for name in ("zen-7b-lora", "zen-72b-lora", "zen-7b-full", "zen-72b-full"):
        assert unsupported_reason(Recipe.named(name).changed(PINNED)) is None
        assert unsupported_reason(Recipe.named(name).changed(PINNED | ZERO)) is None
    assert unsupported_reason(Recipe.named("zen-72b-qlora").changed(PINNED | {"optimizer": "paged_adamw"})) is None
    for shape in ({}, ZERO, {"distributed": None, "hardware": {"gpus": 1}}):
        assert unsupported_reason(Recipe.named("zen-7b-full").changed(PINNED | shape | {"objective": "dpo"})) is None


def test_samples_per_step_are_independent_of_process_count() -> None:
    shape = {"gpus_per_node": 8, "backend": "gloo"}
    recipe = Recipe.named("smollm2-135m-lora").changed({"batch_size": 4, "gradient_accumulation": 3, "distributed": shape})
    assert recipe.for_processes(8) is recipe
    for processes in (1, 2, 3, 6, 32):
        other = recipe.for_processes(processes)
        assert (other.processes, other.samples_per_step) == (processes, 96)
        assert other.batch_size <= 4
        assert other.max_rows_per_step == 96 and other.rows_per_step is None
        assert other.tokens_per_step == recipe.tokens_per_step
    for processes in (5, 7, 64, 95):
        other = recipe.for_processes(processes)
        assert (other.processes, other.samples_per_step) == (processes, 96)
        assert (
            other.batch_size <= 4 and other.max_rows_per_step - processes * other.batch_size < 96 <= other.max_rows_per_step
        )
        assert other.tokens_per_step == recipe.tokens_per_step
        assert Recipe.model_validate(other.model_dump(mode="json")) == other
        back = other.for_processes(8)
        assert (back.samples_per_step, back.rows_per_step, back.max_rows_per_step) == (96, None, 96)
    with pytest.raises(
        BadConfiguration, match="97 processes need a row each, but a step has only 96: use at most 96 processes"
    ):
        recipe.for_processes(97)


@pytest.mark.requirement("I10")
def test_run_on_32_gpus_continues_on_24() -> None:
    """With 128 rows, 5 1/3 per process, the last round of micro-batches is partial."""
    hardware = {"gpus": 8, "gpu_type": "nvidia-a100-80gb"}
    four_nodes = {"strategy": "fsdp", "num_nodes": 4, "gpus_per_node": 8}
    recipe = Recipe.named("smollm2-135m-full").changed(
        {"batch_size": 2, "gradient_accumulation": 2, "distributed": four_nodes, "hardware": hardware}
    )
    assert (recipe.processes, recipe.samples_per_step) == (32, 128)
    left = recipe.for_processes(24)
    assert left.distributed is not None
    assert (left.distributed.num_nodes, left.distributed.gpus_per_node, left.hardware.gpus) == (3, 8, 8)
    assert (left.batch_size, left.gradient_accumulation, left.samples_per_step) == (2, 3, 128)
    assert left.with_max_batch_size(1).gradient_accumulation == 6
    one_node = recipe.for_processes(12)
    assert one_node.distributed is not None
    assert (one_node.distributed.num_nodes, one_node.distributed.gpus_per_node, one_node.hardware.gpus) == (1, 12, 12)
    assert left.for_processes(32).model_dump() == recipe.model_dump()


@pytest.mark.parametrize("key", ["batch_size", "gradient_accumulation", "rows_per_step", "lora_rank"])
def test_batch_and_rank_numbers_are_limited(key: str) -> None:
    with pytest.raises(BadConfiguration, match=f"'{key}': Input should be less than or equal to 1000000"):
        Recipe.named("smollm2-135m-lora").changed({"batch_size": 4, "gradient_accumulation": 1, key: 4_000_000_000_000})


@pytest.mark.parametrize(("rows", "fits"), [(16, False), (17, True), (24, True), (25, False)])
def test_rows_per_step_leaving_a_round_empty_are_refused(rows: int, fits: bool) -> None:
    recipe = Recipe.named("smollm2-135m-lora")
    keys = {"batch_size": 2, "gradient_accumulation": 3, "distributed": {"gpus_per_node": 4}, "rows_per_step": rows}
    if fits:
        assert recipe.changed(keys).samples_per_step == rows
        return
    with pytest.raises(BadConfiguration, match=rf"rows_per_step is {rows}, but .* make 17 to 24: make them agree"):
        recipe.changed(keys)
