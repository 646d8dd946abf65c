"""Recipes of a training by two processes."""

FULL = {"method": "full", "dtype": "float32", "learning_rate": 1e-3}

RECORDING = """
import hashlib
import torch.distributed as dist
from recipes.training.objectives.sft import Sft

class Recording(Sft):
    "Writes down each row that the model learns from, once, into the file that the recipe's description names."

    def loss(self, model, batch):
        rank = dist.get_rank() if dist.is_initialized() else 0
        if model.training and rank % self.recipe.tensor_parallel == 0:
            with open(self.recipe.description, "a") as file:
                for row in batch["input_ids"]:
                    file.write(hashlib.sha256(row.numpy().tobytes()).hexdigest() + "\\n")
        return None
"""
