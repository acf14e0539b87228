"""A small convolutional network on scikit-learn's handwritten digits, trained by the Trainer of Lightning.

    pip install '.[adapters]'
    gradpost up --pservers 2 --trainers 2 -- python examples/lightning_module.py

`configure_optimizers` returns a RemoteOptimizer. Each process has a Trainer that runs as if it were alone, with its
part of the data; schedules, accumulation, clipping and metrics are Lightning's own. What differs from the strategy
"ddp": `gradient_clip_val` clips what each process has computed, before it is pushed, and not the mean of all. What
Lightning saves is for using the model: a run goes on from what the pservers keep. Lightning counts its own steps: a
script that is started again trains all its epochs once more, on top of the rounds that the run has, and a warning says
so. A loop over `optimizer.epochs`, as in examples/digits.py, continues instead.
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gradpost


class Digits(lightning.LightningModule):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU()),
            *(nn.Conv2d(24, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(48 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10)),
        )

    def training_step(self, batch: list[Tensor]) -> Tensor:
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.layers(inputs), labels)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        session, loss = gradpost.connect(), self.trainer.callback_metrics["loss"].item()  # the open session
        session.report(loss=loss)
        if session.rank == 0:
            print(f"epoch {self.current_epoch + 1:2} of {self.trainer.max_epochs}  loss {loss:.4f}")

    def test_step(self, batch: list[Tensor]) -> None:
        inputs, labels = batch
        self.log("accuracy", (self.layers(inputs).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = gradpost.RemoteOptimizer(torch.optim.AdamW(self.named_parameters(), lr=self.lr), model=self)
        num_steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, total_steps=num_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """1,437 images of 8x8 pixels to train on and 360 that are held out; the same split everywhere."""
    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    parts = train_test_split(inputs, torch.tensor(labels), test_size=0.2, random_state=0, stratify=labels)
    return TensorDataset(parts[0], parts[2]), TensorDataset(parts[1], parts[3])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="of each trainer")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--output", help="folder for what Lightning saves after each epoch; none by default")
    options = parser.parse_args()

    session = gradpost.connect()
    torch.manual_seed(0)
    train, held_out = load_data()
    sampler = DistributedSampler(train, session.world_size, session.rank)
    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        gradient_clip_val=1.0,
        default_root_dir=options.output,
        enable_checkpointing=session.rank == 0 and options.output is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        accelerator="cpu",
        devices=1,  # whatever WORLD_SIZE says: between processes there are only the pservers
    )
    model = Digits(options.lr)
    trainer.fit(model, DataLoader(train, options.batch_size, sampler=sampler))

    [result] = trainer.test(model, DataLoader(held_out, len(held_out)), verbose=False)
    session.report(accuracy=result["accuracy"])
    print(f"accuracy on {len(held_out)} held-out images: {result['accuracy']:.4f}")


if __name__ == "__main__":
    main()
