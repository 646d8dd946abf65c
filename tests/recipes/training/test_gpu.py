"""Behaviour that only GPUs can show.

Bit-exact resume, out of memory, MFU, evaluation, and NCCL between two GPUs.
"""

import os
import random
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from recipes import evaluate
from recipes.contracts.job import EXIT_BAD_CONFIGURATION, Job, Result
from recipes.contracts.recovery_log import NotCompiled, OutOfMemory
from recipes.contracts.results import EvaluationReport
from recipes.planning.gpus import GPU_SPECS
from recipes.training import packed_attention
from recipes.training.determinism import RandomStates
from resources.stack.detached_process import read_pid
from tests.recipes.tiny_training import LORA as ADAPTER
from tests.recipes.tiny_training import TinyTraining
from tests.recipes.training.simulated_pods import NODES, Gang
from tests.recipes.training.tracked_runs import Runs, children, install, losses_of, step_of
from tests.recipes.training.training_workspace import Place, facts
from tests.support.recipes.attention_trainer import trainer_of

pytestmark = pytest.mark.gpu

FULL = {"method": "full", "dtype": "float32", "learning_rate": 1e-3}
HALF = {"method": "full", "dtype": "bfloat16", "learning_rate": 1e-3}
LORA = {"base_dtype": "bfloat16", "lora_dropout": 0.1}
QLORA = LORA | {"method": "qlora", "base_dtype": "nf4", "compute_dtype": "bfloat16", "double_quant": True}
TINY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 400,
    "max_position_embeddings": 256,
}
HUNGRY = """
import torch
from recipes.training.objectives.sft import Sft

class Hungry(Sft):
    "A row in training costs three tenths of the GPU's memory: two fit, four do not."

    def loss(self, model, batch):
        if model.training:
            row = 3 * torch.cuda.get_device_properties(0).total_memory // 10
            torch.empty(len(batch["input_ids"]) * row, dtype=torch.uint8, device=batch["input_ids"].device)
        return None
"""


LOPSIDED = HUNGRY.replace("class Hungry", "class Lopsided").replace(
    "if model.training:", "if model.training and torch.distributed.get_rank() == 1:"
)
"""Only one process runs out of memory.

The other waits in an NCCL collective, which does not report the missing peer.
"""


def on_gpus(count: int, strategy: str = "ddp") -> dict[str, Any]:
    """Return recipe settings for this many local GPUs; fail if there are fewer."""
    found = torch.cuda.device_count()
    if found < count:
        pytest.fail(f"needs {count} GPU{'s' * (count > 1)}, and this machine has {found}: run `make test-gpu` on another")
    name = torch.cuda.get_device_name(0).upper()
    gpu_type = next((known for known in GPU_SPECS if known.split("-")[1].upper() in name), None)
    return {
        "hardware": {"cpu": 1, "gpus": count, "gpu_type": gpu_type},
        "distributed": {"strategy": strategy, "gpus_per_node": count, "backend": "nccl"},
    }


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("lora", LORA | {"gradient_accumulation": 2}),
        ("float16", {"base_dtype": "float16", "lora_dropout": 0.1, "gradient_checkpointing": True}),
        ("qlora", QLORA | {"optimizer": "paged_adamw"}),
        ("eight-bits", LORA | {"optimizer": "adamw_8bit"}),
        ("full", FULL),
        ("half", HALF | {"gradient_checkpointing": True}),
    ],
)
def test_killed_gpu_run_ends_bit_identical(runs: Runs, name: str, method: dict[str, Any]) -> None:
    """Dropout uses the random state of the GPU.

    The first kill also deletes the compiler cache, as on a lost machine: blocks are compiled again. Where they
    cannot be compiled, a run detects it once.
    """
    settings = {"max_steps": 20, **method, **on_gpus(1)}
    whole = runs.train(runs.job(f"gpu-{name}-whole", **settings))
    losses = list(losses_of(whole).values())
    assert sum(losses[-4:]) < sum(losses[:4])
    due = [random.randrange(first, first + 6) for first in (1, 10)]
    job = runs.job(f"gpu-{name}-killed", **settings)
    killed: dict[int, int] = {}
    compiled: list[str] = []

    def kill(line: str) -> None:
        compiled.extend([line] * ("blocks are compiled" in line))
        pid = read_pid(Path(job.work_dir))
        if due and pid and pid not in killed and step_of(line) >= due[0]:
            os.kill(pid, signal.SIGKILL)
            if not killed:
                for compiled_programs in ("inductor", "triton"):
                    shutil.rmtree(Path(job.cache_dir, compiled_programs))
            killed[pid] = due.pop(0)

    result = runs.train(job, kill)
    starts = 1 if any(isinstance(incident, NotCompiled) for incident in facts(whole).incidents) else 3
    assert len(killed) == 2 and len(compiled) == starts, (killed, compiled)
    assert losses_of(result) == losses_of(whole), killed
    assert {role: made.digest for role, made in result.artifacts.items()} == {
        role: made.digest for role, made in whole.artifacts.items()
    }, killed


def test_step_out_of_gpu_memory_continues_with_smaller_micro_batches(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("hungry", HUNGRY, tmp_path, monkeypatch)
    enough = runs.train(runs.job("gpu-enough", **on_gpus(1)))
    short = runs.train(runs.job("gpu-short", objective="hungry", **on_gpus(1)))
    assert facts(short).incidents == (OutOfMemory(step=1, batch_size=2, gradient_accumulation=2, after=0),)
    assert losses_of(short) == pytest.approx(losses_of(enough), rel=1e-3)


@pytest.mark.requirement("M7")
def test_evaluation_on_gpu_equals_evaluation_on_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(1)
    tiny = TinyTraining(tmp_path)
    trained = tiny.untrained(**ADAPTER)

    def losses(name: str) -> list[float | None]:
        report = EvaluationReport.model_validate(tiny.evaluate(name, trained, **ADAPTER).facts["report"])
        return [report.scores[model].loss for model in ("base", "tuned")]

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = losses("gpu")
    weights = sum(file.stat().st_size for file in tiny.model.glob("*.safetensors"))
    assert torch.cuda.max_memory_allocated() - before > weights
    monkeypatch.setattr(evaluate, "select_compute_device", lambda: torch.device("cpu"))
    assert found == pytest.approx(losses("without"), rel=1e-4)


def test_mfu_is_logged_for_each_step(runs: Runs) -> None:
    settings = on_gpus(1)
    assert settings["hardware"]["gpu_type"], f"recipes.planning.gpus does not know {torch.cuda.get_device_name(0)}: add it"
    runs.train(runs.job("gpu-mfu", max_steps=4, base_dtype="bfloat16", **settings))
    shares = dict(runs.losses("gpu-mfu", "train/mfu"))
    assert set(shares) == {1, 2, 3, 4}
    assert all(0 < share < 1 for share in shares.values())


SHARED: list[tuple[str, dict[str, Any], float]] = [
    ("ddp", {}, 1e-4),
    ("fsdp", FULL, 1e-4),
    ("fsdp", HALF, 1e-2),
    ("fsdp", {"base_dtype": "bfloat16"}, 1e-2),
    ("pipeline", FULL, 1e-4),
    ("deepspeed_zero2", FULL, 1e-4),
    ("deepspeed_zero3", FULL, 1e-4),
]
"""Strategy, settings, and relative tolerance of the losses against one GPU."""


@pytest.mark.parametrize(("strategy", "method", "tolerance"), SHARED)
def test_two_gpus_compute_the_losses_of_one(runs: Runs, strategy: str, method: dict[str, Any], tolerance: float) -> None:
    """Gradients, and activations between stages, travel over NCCL."""
    trained = f"{method.get('method', 'lora')}-{method.get('dtype', method.get('base_dtype', 'float32'))}"
    both = on_gpus(2, strategy) | ({"gradient_accumulation": 2} if strategy == "pipeline" else {})
    one = runs.train(runs.job(f"gpu-{trained}-one", batch_size=4, **method, **on_gpus(1)))
    two = runs.train(runs.job(f"gpu-{strategy}-{trained}-two", batch_size=2, **method, **both))
    assert losses_of(two) == pytest.approx(losses_of(one), rel=tolerance)


@pytest.mark.parametrize(
    ("strategy", "method"),
    [
        ("ddp", LORA),
        ("ddp", QLORA),
        ("fsdp", LORA),
        ("fsdp", HALF),
        ("pipeline", HALF | {"gradient_accumulation": 2}),
        ("deepspeed_zero2", HALF),
        ("deepspeed_zero3", HALF),
    ],
)
def test_killed_run_on_two_gpus_ends_bit_identical(runs: Runs, strategy: str, method: dict[str, Any]) -> None:
    """With the random states of both GPUs."""
    name = f"gpu-{strategy}-{method.get('method', 'lora')}"
    settings = {"max_steps": 12, "batch_size": 2, **method, **on_gpus(2, strategy)}
    whole = runs.train(runs.job(f"{name}-on-two", **settings))
    job = runs.job(f"{name}-on-two-killed", **settings)
    victim = random.randrange(2)
    killed: list[int] = []

    def kill(line: str) -> None:
        pid = read_pid(Path(job.work_dir))
        if not killed and pid and step_of(line) >= 5:
            killed.append(children(pid)[victim])
            os.kill(killed[0], signal.SIGKILL)

    result = runs.train(job, kill)
    assert killed and facts(result).resumed_from, victim
    assert losses_of(result) == losses_of(whole), victim
    assert {role: made.digest for role, made in result.artifacts.items()} == {
        role: made.digest for role, made in whole.artifacts.items()
    }, victim


def on_one_gpu(runs: Runs, name: str, job: Job, tmp_path: Path, kill_after: int = 0) -> Result:
    """Return the result of two nodes that share this machine's GPU.

    The second node is killed after step `kill_after`, if given. NCCL takes the nodes for two machines and uses the
    network between them: within one machine it refuses two processes on the same GPU.
    """
    variables = [{"NCCL_HOSTID": str(rank), "NCCL_SOCKET_IFNAME": "lo"} for rank in range(NODES)]
    if kill_after:
        gang = Gang(job, tmp_path / f"{name}-killed", variables)
        gang.until(kill_after)
        gang.kill(1)
        assert gang.wait()[0] not in (0, EXIT_BAD_CONFIGURATION), gang.said()
    gang = Gang(job, tmp_path / name, variables)
    assert gang.wait() == [0] * NODES, gang.said()
    return Result.model_validate_json(runs.place.store.get_bytes(job.result_uri))


@pytest.mark.parametrize(
    ("strategy", "method", "tolerance"),
    [
        ("ddp", {"base_dtype": "bfloat16"}, 1e-2),
        ("ddp", QLORA | {"lora_dropout": 0.0}, 1e-2),
        ("fsdp", FULL, 1e-4),
        ("fsdp", HALF, 1e-2),
        ("fsdp", {"base_dtype": "bfloat16"}, 1e-2),
        ("pipeline", FULL | {"gradient_accumulation": 2}, 1e-4),
        ("deepspeed_zero2", FULL, 1e-4),
        ("deepspeed_zero3", HALF, 2e-2),
    ],
)
def test_two_nodes_on_one_gpu_match_one_and_survive_a_kill(
    runs: Runs, tmp_path: Path, strategy: str, method: dict[str, Any], tolerance: float
) -> None:
    """Gradients, and activations between stages, travel over NCCL; one node is killed in between."""
    one = on_gpus(1) | {"max_steps": 16}
    shape = {"strategy": strategy, "num_nodes": NODES, "gpus_per_node": 1, "backend": "nccl"}
    name = f"gpu-nodes-{strategy}-{method.get('method', 'lora')}-{method.get('dtype', method.get('base_dtype'))}"
    single = {name: value for name, value in method.items() if name != "gradient_accumulation"}
    both = method | one | {"batch_size": 2, "distributed": shape}
    with ThreadPoolExecutor() as at_once:
        found = (
            at_once.submit(runs.train, runs.job(f"{name}-alone", **single, **one, batch_size=4)),
            at_once.submit(on_one_gpu, runs, "whole", runs.job(f"{name}-whole", **both), tmp_path),
            at_once.submit(on_one_gpu, runs, "lost", runs.job(f"{name}-lost", **both), tmp_path, kill_after=3),
        )
    alone, whole, lost = (run.result() for run in found)
    assert losses_of(whole) == pytest.approx(losses_of(alone), rel=tolerance)
    assert facts(lost).resumed_from
    assert losses_of(lost) == losses_of(whole)
    assert {role: made.digest for role, made in lost.artifacts.items()} == {
        role: made.digest for role, made in whole.artifacts.items()
    }


def test_out_of_memory_on_one_of_two_gpus_stops_the_other(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("lopsided", LOPSIDED, tmp_path, monkeypatch)
    short = runs.train(runs.job("gpu-lopsided", objective="lopsided", **on_gpus(2)))
    assert facts(short).incidents == (OutOfMemory(step=1, batch_size=2, gradient_accumulation=2, after=0),)


def test_random_state_is_restored_on_another_gpu(tmp_path: Path) -> None:
    """A resumed process may use another GPU, among more or fewer."""
    on_gpus(2)
    with torch.cuda.device(0):
        torch.cuda.manual_seed(1)
        RandomStates.capture().save(tmp_path / "states.safetensors")
        expected = torch.rand(4, device="cuda").tolist()
    with torch.cuda.device(1):
        torch.cuda.manual_seed(2)
        RandomStates.load(tmp_path / "states.safetensors").restore()
        assert torch.rand(4, device="cuda").tolist() == expected


def test_one_process_sees_one_of_two_gpus(runs: Runs) -> None:
    """transformers would use all GPUs that it finds, which multiplies the rows per step."""
    on_gpus(2)
    one_gpu = on_gpus(1)
    alone = runs.train(runs.job("gpu-one-process", **one_gpu))
    hardware_only = runs.train(runs.job("gpu-hardware-only", hardware=one_gpu["hardware"]))
    assert losses_of(hardware_only) == losses_of(alone)


def attended(
    config: dict[str, Any], packed: bool, positions: torch.Tensor, *, stated: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss and the gradient of the embeddings on rows with these positions.

    The model gets the positions only if `stated`.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**TINY | config), dtype=torch.bfloat16, attn_implementation="sdpa"
    ).cuda()
    if packed:
        assert packed_attention.supports_packed_attention(model.config, torch.bfloat16)
        packed_attention.use_packed_attention(model)
    tokens = torch.randint(0, 400, positions.shape, generator=torch.Generator().manual_seed(1)).cuda()
    inputs = {"position_ids": positions.cuda()} if stated else {}
    loss = model(input_ids=tokens, labels=tokens, **inputs, use_cache=False).loss
    loss.backward()
    return loss.detach(), model.get_input_embeddings().weight.grad.float()


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama"},
        {"model_type": "llama", "num_key_value_heads": 2},
        {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 24},
        {"model_type": "qwen2"},
        {"model_type": "qwen3", "num_key_value_heads": 1},
    ],
    ids=str,
)
def test_maskless_attention_equals_masked_attention_on_gpu(config: dict[str, Any]) -> None:
    on_gpus(1)
    rows = [[50, 14, 64], [128], [1, 1, 100, 26]]
    positions = torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in rows])
    loss, gradient = attended(config, False, positions)
    found, found_gradient = attended(config, True, positions)
    assert float(found) == pytest.approx(float(loss), rel=1e-3)
    assert float((found_gradient - gradient).norm() / gradient.norm()) < 0.02
    across, _ = attended(config, True, torch.arange(128).expand(3, 128))
    assert abs(float(across - loss)) > 10 * abs(float(found - loss)), "where examples end must matter"
    of_whole_rows, _ = attended(config, True, positions, stated=False)
    assert float(of_whole_rows) == pytest.approx(float(across), rel=1e-3)


@pytest.mark.parametrize("method", [LORA, {"method": "full", "dtype": "bfloat16"}, LORA | {"objective": "dpo"}], ids=str)
def test_step_does_not_synchronize_with_the_gpu(place: Place, tmp_path: Path, method: dict[str, Any]) -> None:
    on_gpus(1)
    trainer = trainer_of(place, tmp_path, **method)
    rows = [trainer.train_dataset[row] for row in range(4)]
    batches = [trainer._prepare_inputs(trainer.data_collator(rows)) for _ in range(2)]
    items = trainer._get_num_items_in_batch(batches, trainer.args.device)
    trained = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    for batch, mode in zip(batches, ("default", "error"), strict=True):  # compilation may synchronize
        torch.cuda.set_sync_debug_mode(mode)
        try:
            loss: Any = trainer.compute_loss(trainer.model, batch, num_items_in_batch=items)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
        finally:
            torch.cuda.set_sync_debug_mode("default")
