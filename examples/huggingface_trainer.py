"""A small vision transformer on scikit-learn's handwritten digits, trained by the Trainer of Hugging Face.

    pip install '.[adapters]'
    gradpost up --pservers 2 --trainers 2 -- python examples/huggingface_trainer.py

The Trainer is given a RemoteOptimizer. Each process has a Trainer that runs as if it were alone, with its part of the
data; schedules, accumulation, clipping and logging are the Trainer's own. What differs from DistributedDataParallel:
`max_grad_norm` clips what each process has computed, before it is pushed, and not the mean of all. What the Trainer
saves has the optimizer's slots; a run that was stopped goes on from what the pservers keep, too. The Trainer counts its
own steps: a script that is started again trains all its epochs once more, on top of the rounds that the run has, and a
warning says so. A loop over `optimizer.epochs`, as in examples/digits.py, continues instead.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import transformers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from transformers import EvalPrediction, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

import gradpost

ACCUMULATED = 2  # batches in a step


def make_model() -> transformers.ViTForImageClassification:
    images = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
    layers = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**images, **layers, initializer_range=0.2))


def load_data() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """1,437 images of 8x8 pixels to train on and 360 that are held out; the same split everywhere."""
    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    rows = [{"pixel_values": image, "labels": label} for image, label in zip(inputs, labels, strict=True)]
    train, held_out = train_test_split(rows, test_size=0.2, random_state=0, stratify=labels)
    return train, held_out


def measure_accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


class Report(TrainerCallback):
    """Show the loss in `gradpost status` and on the dashboard."""

    def on_log(self, *_: object, logs: dict[str, float], **__: object) -> None:
        if "loss" in logs:
            gradpost.connect().report(loss=logs["loss"])  # the open session


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=16, help=f"of each trainer, {ACCUMULATED} times in a step")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--output", help="folder for what the Trainer saves after each epoch; none by default")
    options = parser.parse_args()

    session = gradpost.connect()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)  # the Trainer would start torch.distributed, and give each a part of its part

    train, held_out = load_data()
    part = train[session.rank :: session.world_size][: len(train) // session.world_size]  # equal numbers of steps
    transformers.logging.disable_progress_bar()
    arguments = TrainingArguments(
        output_dir=options.output or os.curdir,  # it makes a folder even if it saves nothing
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.batch_size,
        gradient_accumulation_steps=ACCUMULATED,
        max_grad_norm=1.0,
        logging_strategy="epoch",
        save_strategy="epoch" if session.rank == 0 and options.output else "no",
        disable_tqdm=True,
        report_to="none",
        use_cpu=True,
    )
    torch.manual_seed(arguments.seed)
    model = make_model()
    optimizer = gradpost.RemoteOptimizer(torch.optim.AdamW(model.named_parameters(), lr=options.lr), model=model)
    num_steps = options.epochs * -(-len(part) // (options.batch_size * ACCUMULATED))
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, num_steps // 10, num_steps)
    trainer = Trainer(
        model, arguments, train_dataset=part, compute_metrics=measure_accuracy, optimizers=(optimizer, schedule)
    )
    trainer.add_callback(Report)
    if session.rank > 0:
        trainer.remove_callback(PrinterCallback)
    trainer.train()

    accuracy = trainer.evaluate(held_out)["eval_accuracy"]
    session.report(accuracy=accuracy)
    print(f"accuracy on {len(held_out)} held-out images: {accuracy:.4f}")


if __name__ == "__main__":
    main()
