"""A micro-batch is computed without reading a value from the device.

While the host waits for a GPU, it queues no further work.

The device here is PyTorch's `meta`, which has no values: reading one, counting them, or combining tensors of two
devices is an error.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.recipes.training.training_workspace import Place
from tests.support.recipes.attention_trainer import trainer_of


@pytest.mark.parametrize(
    "changed",
    [
        {"gradient_checkpointing": True},
        {"method": "full", "dtype": "bfloat16"},
        {"base_dtype": "float16"},
        {"objective": "dpo"},
        {"objective": "dpo", "method": "full", "dtype": "bfloat16"},
        {"objective": "orpo"},
    ],
    ids=str,
)
def test_micro_batch_does_not_synchronize_with_the_device(place: Place, tmp_path: Path, changed: dict[str, Any]) -> None:
    trainer = trainer_of(place, tmp_path, **changed)
    trainer.model.to("meta").train()
    if frozen := getattr(trainer.objective, "_frozen", None):
        frozen.to("meta")
    rows = [trainer.train_dataset[row] for row in range(4)]

    def batch() -> dict[str, Any]:
        found = trainer.data_collator(rows)
        return {name: part.to("meta") if isinstance(part, torch.Tensor) else part for name, part in found.items()}

    items = trainer._get_num_items_in_batch([batch()], torch.device("meta"))
    for _ in range(2):
        loss: Any = trainer.compute_loss(trainer.model, batch(), num_items_in_batch=items)
        loss.backward()
    trained = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    assert all(weight.grad is not None and weight.grad.is_meta for weight in trained)
    assert torch.nn.utils.clip_grad_norm_(trained, 1.0).is_meta

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(trainer, "_prepare_inputs", lambda found: batch())
        evaluated = trainer._evaluate_batch(range(4))
    assert all(torch.is_tensor(mean) and mean.is_meta for mean in evaluated.means.values())
    with pytest.raises(RuntimeError, match="meta"):
        float(evaluated.means["loss"])
