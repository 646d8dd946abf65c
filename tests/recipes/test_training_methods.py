"""Every method through train, evaluate and convert in this process, on a tiny model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from recipes.contracts.job import BadConfiguration, Result
from recipes.export.merge import relative_error
from recipes.training import precision
from recipes.training.checkpointing.state_files import read_state
from recipes.training.model import load_model
from tests.recipes.tiny_training import FULL, LORA, QLORA, TinyTraining, losses


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyTraining:
    return TinyTraining(tmp_path_factory.mktemp("methods"))


METHODS: dict[str, dict[str, Any]] = {"lora": LORA, "qlora": QLORA, "full": FULL}


@pytest.mark.requirement("L7", "Z23")
@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_method_passes_training_evaluation_and_conversion(tiny: TinyTraining, method: str) -> None:
    """Trained, resumed bit-identically on another machine, evaluated, merged and exported."""
    recipe = METHODS[method]
    role = tiny.recipe(**recipe).trained_role
    trained = tiny.train(method, **recipe)
    assert losses(trained)[-1] < losses(trained)[0]
    assert trained.artifacts[role].kind == role
    assert tiny.store.manifest(trained.artifacts[role]).inputs == {
        "run": tiny.run.digest,
        "base": trained.artifacts["base"].digest,
        **{name: tiny.splits[name].digest for name in ("train", "validation")},
    }

    tiny.lose_checkpoints(method, after=2)
    resumed = tiny.train(method, **recipe)
    assert resumed.facts["resumed_from"] == 2
    assert losses(resumed) == losses(trained)
    assert resumed.artifacts == trained.artifacts

    report = tiny.evaluate(method, trained, **recipe).facts["report"]
    assert report["scores"]["tuned"]["loss"] < report["scores"]["base"]["loss"]  # type: ignore[call-overload, index]

    converted = tiny.convert(method, trained, **recipe)
    merged = converted.artifacts["merged"]
    assert tiny.store.manifest(merged).inputs == {
        role: trained.artifacts[role].digest,
        "base": trained.artifacts["base"].digest,
    }
    assert (tiny.fetch(converted.artifacts["gguf"]) / "model.gguf").stat().st_size > 100_000


@pytest.fixture
def computes_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend native support; other processors compute bfloat16 too, but slowly."""
    (tmp_path / "cpuinfo").write_text("flags : avx512_bf16")
    monkeypatch.setattr(precision, "CPUINFO", tmp_path / "cpuinfo")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.usefixtures("computes_bfloat16")
def test_full_bfloat16_training_updates_every_weight_at_a_tiny_learning_rate(tiny: TinyTraining) -> None:
    """As in zen-72b-full: a step of 5e-6 changes hardly any weight stored in bfloat16."""
    recipe = FULL | {"dtype": "bfloat16", "max_steps": 1, "learning_rate": 5e-6, "seed": 7}
    trained = tiny.train("full-bfloat16", **recipe)
    before = tensors_of(tiny.model)
    after = tensors_of(tiny.folder / "work/full-bfloat16/checkpoints/1")
    assert before.keys() == after.keys()
    # Embeddings of unused tokens have no gradient, nor have products that round to zero in bfloat16.
    moved = {name: (after[name] != before[name].float()).float().mean().item() for name in before}
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    assert min(share for name, share in moved.items() if "embed" not in name) > 0.9
    lost = {name: (after[name].bfloat16() == before[name].bfloat16()).float().mean().item() for name in before}
    assert min(lost.values()) > 0.5, "what the test is about"
    folder = tiny.fetch(trained.artifacts["weights"])
    assert {tensor.dtype for tensor in tensors_of(folder).values()} == {torch.bfloat16}
    merged = tiny.fetch(tiny.convert("full-bfloat16", trained, **recipe).artifacts["merged"])
    assert {tensor.dtype for tensor in tensors_of(merged).values()} == {torch.bfloat16}
    assert str(tiny.folder) not in (folder / "config.json").read_text()
    assert "transformers_version" not in json.loads((folder / "config.json").read_text())


@pytest.mark.slow
@pytest.mark.usefixtures("computes_bfloat16")
def test_full_bfloat16_training_computes_in_bfloat16(tiny: TinyTraining) -> None:
    """Close to float32 but not equal, which would mean no saving; resumes bit-identically."""
    recipe = FULL | {"dtype": "bfloat16"}
    trained = tiny.train("computed-in-bfloat16", **recipe)
    exact = losses(tiny.train("computed-in-float32", **FULL))
    assert losses(trained) != exact
    assert losses(trained) == pytest.approx(exact, rel=0.02)
    tiny.lose_checkpoints("computed-in-bfloat16", after=2)
    assert tiny.train("computed-in-bfloat16", **recipe).artifacts == trained.artifacts


@pytest.mark.slow
def test_activation_checkpointing_changes_no_loss_or_weight(tiny: TinyTraining) -> None:
    """With dropout: recomputation must draw the same random numbers."""
    plain = tiny.train("kept", **LORA, max_steps=2)
    again = tiny.train("computed-twice", **LORA, max_steps=2, gradient_checkpointing=True)
    assert losses(again) == losses(plain)
    assert weights_of(tiny, again) == weights_of(tiny, plain)


def weights_of(tiny: TinyTraining, trained: Result) -> list[str]:
    manifest = tiny.store.manifest(trained.artifacts["adapter"])
    return [file.sha256 for file in manifest.files if file.path.endswith(".safetensors")]


@pytest.mark.slow
def test_optimizer_states_of_eight_bits_survive_a_restart(tiny: TinyTraining) -> None:
    recipe = FULL | {"optimizer": "adamw_8bit", "max_steps": 4}
    trained = tiny.train("eight-bits", **recipe)
    states = read_state(tiny.folder / "work/eight-bits/checkpoints/4/optimizer.safetensors")["state"].values()
    quantized = [state["__bnb_optimizer_quant_state__"]["state1"].dtype for state in states]
    assert torch.uint8 in quantized
    tiny.lose_checkpoints("eight-bits", after=2)
    assert tiny.train("eight-bits", **recipe).artifacts == trained.artifacts


def test_a_paged_optimizer_needs_a_gpu(tiny: TinyTraining, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BadConfiguration, match="there is no GPU here: use adamw or adamw_8bit"):
        tiny.train("paged", **LORA, optimizer="paged_adamw")


def test_qlora_base_weights_are_quantized_to_nf4(tiny: TinyTraining) -> None:
    """Every projection of a block, with quantized constants.

    The bounds contain the error of NF4 on normally distributed weights.
    """
    model = load_model(tiny.model, tiny.recipe(**QLORA))
    quantized = {name: module.weight for name, module in model.named_modules() if isinstance(module, Linear4bit)}
    assert len(quantized) == 2 * 7
    assert all(weight.quant_type == "nf4" and weight.quant_state.nested for weight in quantized.values())
    exact = load_file(tiny.model / "model.safetensors")
    for name, weight in quantized.items():
        file_name = name.removeprefix("base_model.model.").removesuffix(".base_layer") + ".weight"
        error = relative_error(dequantize_4bit(weight.data, weight.quant_state), exact[file_name].float())
        assert 0.05 < error < 0.12, name


def test_qlora_gradients_are_unchanged_after_an_evaluation(tiny: TinyTraining) -> None:
    """Regression: on bfloat16 processors bitsandbytes packed the weights and dropped the gradients."""
    model = load_model(tiny.model, tiny.recipe(**QLORA | {"lora_dropout": 0.0}))
    with torch.no_grad():  # a new adapter is zero and has no gradient
        for name, tensor in model.named_parameters():
            if "lora_B" in name:
                tensor.fill_(0.01)
    words = torch.arange(32).unsqueeze(0)

    def learned() -> dict[str, torch.Tensor]:
        model.train().zero_grad()
        model(input_ids=words, labels=words).loss.backward()
        return {name: tensor.grad.clone() for name, tensor in model.named_parameters() if tensor.requires_grad}

    before = learned()
    with torch.no_grad():
        model.eval()(input_ids=words)
    after = learned()
    assert all(after[name].equal(gradient) for name, gradient in before.items())


def test_nf4_width_unsupported_on_cpu_is_refused(tiny: TinyTraining, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(tiny.model, intermediate_size=96)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(
        BadConfiguration, match="down_proj is 96 wide, but without a GPU NF4 is only correct for multiples of 64"
    ):
        load_model(tmp_path, tiny.recipe(**QLORA))


def test_unknown_lora_target_module_is_refused(tiny: TinyTraining) -> None:
    """PEFT ignores unknown modules if another matches. Regression: `v_prj` was silently not trained."""
    with pytest.raises(BadConfiguration, match="does not fit its base model: it has no module 'v_prj'"):
        load_model(tiny.model, tiny.recipe(**LORA | {"lora_target_modules": ["q_proj", "v_prj"]}))
    load_model(tiny.model, tiny.recipe(**LORA | {"lora_target_modules": ["self_attn.q_proj", "lm_head"]}))
