"""The program `convert`: outputs, reproducibility and refusals."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import recipes.convert
from recipes.contracts.job import BadConfiguration, Job, Program, Result, StoreAddress
from recipes.contracts.parameters import TokenizeParameters
from recipes.contracts.recipe import Recipe
from recipes.convert import convert
from recipes.export.gguf import export_gguf
from recipes.export.merge import merge_adapter, relative_error
from recipes.preparation.tokenization.frozen_tokenizer import write_tokenizer_files
from recipes.preparation.tokenization.record_tokenizer import RecordTokenizer, Tokens
from recipes.records.record_layouts import Layout
from recipes.storage.artifact_store import BrokenArtifact, Store
from recipes.storage.manifest import Artifact
from tests.recipes.llama_cpp import LlamaCpp
from tests.recipes.tiny_model import make_tiny_adapter, make_tiny_model

RECIPE = Recipe.model_validate(
    {
        "name": "tiny",
        "description": "a test",
        "base_model": {"uri": "file:///tiny", "sha256": "0" * 64},
        "lora_target_modules": ["q_proj"],
        "learning_rate": 1e-3,
        "batch_size": 1,
        "max_steps": 1,
        "sequence_length": 8,
    }
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `base` and its `adapter`."""
    folder = tmp_path_factory.mktemp("made")
    make_tiny_adapter(make_tiny_model(folder / "base"), folder / "adapter")
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Store:
    buckets = {kind: f"hanzo-{kind}" for kind in ("datasets", "checkpoints", "models")}
    return Store(StoreAddress(root=(tmp_path / "objects").as_uri(), buckets=buckets))


def job_for(store: Store, tmp_path: Path, base: Path, adapter: Path, dtype: str = "bfloat16") -> Job:
    inputs = {
        "base": store.publish(base, "s3://hanzo-models/base/tiny", "base"),
        "adapter": store.publish(adapter, "s3://hanzo-ml/checkpoints/run-1/step-1", "checkpoint"),
    }
    return Job(
        id="convert-1",
        program=Program.CONVERT,
        inputs=inputs,
        parameters={
            "recipe": RECIPE.model_copy(update={"base_dtype": dtype}).model_dump(mode="json"),
            "quantization": "F16",
        },
        outputs={"merged": "s3://hanzo-models/tiny/merged", "gguf": "s3://hanzo-models/tiny/gguf"},
        store=store.address,
        work_dir=str(tmp_path / "work"),
        cache_dir=str(tmp_path / "cache"),
        result_uri="s3://hanzo-ml/runs/run-1/convert/result.json",
    )


def run(job: Job, store: Store) -> Result:
    work = Path(job.work_dir)
    work.mkdir(parents=True, exist_ok=True)
    return convert(job, store, work)


def file_in(store: Store, artifact: Artifact, name: str) -> Path:
    folder = store.local_path(artifact.uri)
    assert folder is not None
    return folder / name


def test_served_file_answers_like_base_plus_adapter(made: Path, store: Store, tmp_path: Path) -> None:
    job = job_for(store, tmp_path, made / "base", made / "adapter")
    result = run(job, store)
    merged, gguf = result.artifacts["merged"], result.artifacts["gguf"]
    assert store.manifest(merged).inputs == {role: job.inputs[role].digest for role in ("adapter", "base")}
    assert store.manifest(gguf).inputs == {"merged": merged.digest}
    assert store.manifest(gguf).facts == {"quantization": "F16"}

    tokens = Tokenizer.from_file(str(made / "base/tokenizer.json")).encode("The harbour is called").ids
    base = AutoModelForCausalLM.from_pretrained(made / "base", dtype=torch.float32)
    with torch.inference_mode():
        untuned = torch.log_softmax(base(torch.tensor([tokens])).logits[0, -1], -1)
        tuned_model = PeftModel.from_pretrained(base, str(made / "adapter"))
        tuned = torch.log_softmax(tuned_model(torch.tensor([tokens])).logits[0, -1], -1)
    found = LlamaCpp(file_in(store, gguf, "model.gguf")).next_logprobs(tokens, len(tuned))
    served = torch.tensor([found[token] for token in range(len(tuned))])
    assert (tuned.exp() * (tuned - served)).sum() < 1e-3
    assert (tuned.exp() * (tuned - untuned)).sum() > 1e-2, "the adapter of this test changes nothing"


@pytest.mark.requirement("N8")
def test_merged_folder_is_complete_and_names_no_path(made: Path, store: Store, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(made / "base", base)
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | tojson }}")
    result = run(job_for(store, tmp_path, base, made / "adapter"), store)
    merged = store.fetch(result.artifacts["merged"], tmp_path / "merged")
    config = json.loads((merged / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 50_000.0
    assert str(tmp_path) not in (merged / "config.json").read_text()
    tokenizer = (
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
    )
    for name in tokenizer:
        assert (merged / name).read_bytes() == (base / name).read_bytes()
    assert {tensor.dtype for tensor in load_file(merged / "model.safetensors").values()} == {torch.bfloat16}
    assert not result.metrics
    assert {"seconds_merge", "seconds_export"} <= result.facts.keys()


@pytest.mark.requirement("N4")
def test_a_run_after_a_kill_gives_the_same_digests(
    made: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_for(store, tmp_path, made / "base", made / "adapter")
    work = Path(job.work_dir)
    (work / "merged").mkdir(parents=True)
    (work / "merged" / "other.safetensors.index.json").write_bytes(b"half of it")
    (work / "gguf").mkdir()
    (work / "gguf" / "older.gguf").write_bytes(b"half of it")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(recipes.convert, "export_gguf", killed)
        with pytest.raises(KeyboardInterrupt):
            run(job, store)
    first = run(job, store).artifacts
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    elsewhere = job.model_copy(update={"work_dir": str(tmp_path / "another machine")})
    again = run(elsewhere, store).artifacts
    torch.set_num_threads(threads)
    assert first == again
    store.fetch(again["gguf"], tmp_path)
    assert [record.path for record in store.manifest(first["gguf"]).files] == ["model.gguf"]


def test_a_corrupted_adapter_is_refused_by_its_checksum(made: Path, store: Store, tmp_path: Path) -> None:
    job = job_for(store, tmp_path, made / "base", made / "adapter")
    weights = file_in(store, job.inputs["adapter"], "adapter_model.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(BrokenArtifact, match=r"adapter_model\.safetensors has SHA-256"):
        run(job, store)
    assert store.list("s3://hanzo-models/tiny") == []


@pytest.mark.requirement("I14", "Z27")
@pytest.mark.parametrize(("value", "reason"), [(float("nan"), "not finite"), (float("inf"), "not finite")])
def test_non_finite_weights_are_refused(made: Path, store: Store, tmp_path: Path, value: float, reason: str) -> None:
    adapter = shutil.copytree(made / "adapter", tmp_path / "adapter")
    weights = load_file(adapter / "adapter_model.safetensors")
    next(iter(weights.values()))[0, 0] = value
    save_file(weights, adapter / "adapter_model.safetensors")
    with pytest.raises(BadConfiguration, match=reason) as refusal:
        run(job_for(store, tmp_path, made / "base", adapter), store)
    assert "\n" not in str(refusal.value)
    assert store.list("s3://hanzo-models/tiny") == []


def test_an_overflow_of_the_stored_type_is_refused(made: Path, store: Store, tmp_path: Path) -> None:
    adapter = shutil.copytree(made / "adapter", tmp_path / "adapter")
    weights = load_file(adapter / "adapter_model.safetensors")
    for name, tensor in weights.items():
        if "layers.0.mlp.up_proj" in name:
            tensor *= 3e3  # finite in float32 and bfloat16, but beyond the range of float16
    save_file(weights, adapter / "adapter_model.safetensors")
    with pytest.raises(BadConfiguration, match="not finite"):
        run(job_for(store, tmp_path, made / "base", adapter, dtype="float16"), store)


def test_relative_error_of_all_zero_outputs_is_zero() -> None:
    """Regression: a model diverged to zero output was blamed on layers that cannot merge."""
    nothing, something = torch.zeros(1, 3, 8), torch.ones(1, 3, 8)
    assert (relative_error(nothing, nothing), relative_error(something, nothing)) == (0.0, math.inf)


def test_an_adapter_that_lacks_a_layer_is_refused(made: Path, store: Store, tmp_path: Path) -> None:
    adapter = shutil.copytree(made / "adapter", tmp_path / "adapter")
    weights = load_file(adapter / "adapter_model.safetensors")
    weights.pop(next(iter(weights)))
    save_file(weights, adapter / "adapter_model.safetensors")
    with pytest.raises(BadConfiguration, match="not an adapter of this base model"):
        run(job_for(store, tmp_path, made / "base", adapter), store)


@pytest.mark.requirement("X8")
def test_pickled_weights_are_refused(made: Path, store: Store, tmp_path: Path) -> None:
    adapter = shutil.copytree(made / "adapter", tmp_path / "adapter")
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(BadConfiguration, match=r"has no adapter_model\.safetensors"):
        run(job_for(store, tmp_path, made / "base", adapter), store)


def test_missing_input_is_refused_by_name(made: Path, store: Store, tmp_path: Path) -> None:
    job = job_for(store, tmp_path, made / "base", made / "adapter")
    with pytest.raises(BadConfiguration, match="the input 'base' is missing"):
        run(job.model_copy(update={"inputs": {"adapter": job.inputs["adapter"]}}), store)


TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
QUESTION = [{"role": "user", "content": " Who?  "}]


def base_with_templates(made: Path, folder: Path, templates: object) -> Path:
    """Return a copy of the base with these chat templates in its configuration."""
    shutil.copytree(made / "base", folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": templates}))
    return folder


def export_with(made: Path, store: Store, tmp_path: Path, base: Path, **parameters: object) -> tuple[Result, Path]:
    job = job_for(store, tmp_path, base, made / "adapter")
    recipe = {**job.parameters["recipe"], **{k: v for k, v in parameters.items() if k == "system_prompt"}}  # type: ignore[dict-item]
    more = {key: value for key, value in parameters.items() if key != "system_prompt"}
    result = run(job.model_copy(update={"parameters": {**job.parameters, "recipe": recipe, **more}}), store)
    return result, file_in(store, result.artifacts["gguf"], "model.gguf")


@pytest.mark.slow
def test_named_templates_are_served_and_others_are_reported(made: Path, store: Store, tmp_path: Path) -> None:
    templates = {"rag": "rag " + TEMPLATE, "default": TEMPLATE, "tool_use": "{{ tools | tojson }}" + TEMPLATE, "b": "b"}
    listed = [{"name": name, "template": text} for name, text in templates.items()]
    result, gguf = export_with(made, store, tmp_path, base_with_templates(made, tmp_path / "base", listed))
    engine = LlamaCpp(gguf)
    assert engine.render(QUESTION) == "<|im_start|>user\n Who?  <|im_end|>\n<|im_start|>assistant\n"
    with_tools = engine.post("/apply-template", {"messages": QUESTION, "tools": TOOLS})["prompt"]
    assert with_tools.startswith('[{"type": "function", "function": {"name": "f"')
    assert result.facts["notes"] == ["the engine does not render the chat templates b, rag"]


def test_system_prompt_and_template_arguments_of_training_reach_the_engine(made: Path, store: Store, tmp_path: Path) -> None:
    """The engine's tokens of a question equal those before the answer in training."""
    prompt, arguments = (
        'Sei "nett":\n{{ x }} %} gr\u00f6\u00dfer \U0001f389 \\',
        {"date_string": "26 Jul 2024", "thinks": False, "list": [1, "a"]},
    )
    template = "{% if not thinks %}{{ date_string }} {{ list[1] }}\n{% endif %}" + TEMPLATE
    base = base_with_templates(made, tmp_path / "base", template)
    result, gguf = export_with(made, store, tmp_path, base, system_prompt=prompt, template_arguments=arguments)
    engine, tokenizer = LlamaCpp(gguf), AutoTokenizer.from_pretrained(base)
    parameters = TokenizeParameters(tokenizer="x", system_prompt=prompt, template_arguments=arguments)
    write_tokenizer_files(tokenizer, tmp_path / "frozen", parameters)
    records = [{"instruction": "Who?", "answer": "She."}]
    (trained,) = RecordTokenizer(tmp_path / "frozen", parameters).tokenize(records, [Layout.INSTRUCTION])
    assert isinstance(trained, Tokens)
    asked = engine.tokenize(engine.render([{"role": "user", "content": "Who?"}]))
    assert asked == trained.ids[: trained.runs[0]]
    own = [{"role": "system", "content": "Own."}, *QUESTION]
    assert (
        engine.render(own)
        == "26 Jul 2024 a\n"
        + "".join(f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in own)
        + "<|im_start|>assistant\n"
    )
    facts = store.manifest(result.artifacts["gguf"]).facts
    assert facts == {"quantization": "F16", "system_prompt": prompt, "template_arguments": arguments}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("templates", "said"),
    [
        ("{{ 1.0 | tojson }}" + TEMPLATE, "chat template 'default'"),
        ({"default": TEMPLATE, "tool_use": "{{ tools }}" + TEMPLATE}, "chat template 'tool_use'.* with a tool"),
        ({"rag": TEMPLATE, "other": TEMPLATE}, "the engine renders none of the chat templates other, rag"),
    ],
)
def test_template_rendered_differently_by_the_engine_is_refused(
    made: Path, store: Store, tmp_path: Path, templates: object, said: str
) -> None:
    with pytest.raises(BadConfiguration, match=said):
        export_with(made, store, tmp_path, base_with_templates(made, tmp_path / "base", templates))
    assert store.find("s3://hanzo-models/tiny/gguf") is None


@pytest.mark.slow
def test_added_token_split_differently_by_the_engine_is_refused(made: Path, store: Store, tmp_path: Path) -> None:
    base = base_with_templates(made, tmp_path / "base", TEMPLATE)
    document = json.loads((base / "tokenizer.json").read_text())
    for token in document["added_tokens"]:
        token["rstrip"] = token["content"] == "<|im_end|>"
    (base / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(BadConfiguration, match=r"the engine tokenizes .*<\|im_end\|>.* differently from training"):
        export_with(made, store, tmp_path, base)


@pytest.mark.parametrize("targets", [["q_proj", "lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"]])
def test_adapter_on_one_of_two_tied_weights_unties_them_when_merged(made: Path, tmp_path: Path, targets: list[str]) -> None:
    base = AutoModelForCausalLM.from_pretrained(made / "base", dtype=torch.float32)
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, tensor in adapted.named_parameters():
            if "lora_" in name:
                tensor.normal_(std=0.05)
    adapted.save_pretrained(str(tmp_path / "adapter"))
    merge_adapter(made / "base", tmp_path / "adapter", tmp_path / "merged", "float32")
    tokens = torch.arange(20)[None]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.inference_mode():
        assert relative_error(merged(tokens).logits, adapted.eval()(tokens).logits) < 1e-4
    export_gguf(tmp_path / "merged", tmp_path / "model.gguf", "F16")
    assert "output.weight" in {tensor.name for tensor in GGUFReader(tmp_path / "model.gguf").tensors}
