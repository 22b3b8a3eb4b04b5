"""A Hugging Face Trainer training that goes on where it stopped when it is started again: resume_from_checkpoint.

    allranks run --nproc-per-node 2 --max-restarts 3 examples/hf_trainer/train.py

A tiny GPT-2 learns the bytes of this file; nothing is fetched. The Trainer writes its checkpoints in place, with
trainer_state.json as the last file: one without it is not whole.
"""

import argparse
import hashlib
import json
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed


class Windows(Dataset):
    """Pieces of a text, a byte a token."""

    def __init__(self, text: bytes, length: int) -> None:
        self.tokens = torch.tensor(list(text))
        self.length = length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index):
        piece = self.tokens[index * self.length : (index + 1) * self.length]
        return {"input_ids": piece, "labels": piece}


class Slow(TrainerCallback):
    def __init__(self, step_s: float) -> None:
        self.step_s = step_s

    def on_step_begin(self, args, state, control, **kwargs):
        time.sleep(self.step_s)


def newest_whole(directory: Path) -> str | None:
    def is_whole(path: Path) -> bool:
        try:
            json.loads((path / "trainer_state.json").read_text())
        except (OSError, ValueError):
            return False
        return True

    found = sorted(directory.glob("checkpoint-*"), key=lambda path: int(path.name.removeprefix("checkpoint-")))
    return next((str(path) for path in reversed(found) if is_whole(path)), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--step-s", type=float, default=0.0, help="minimum duration of a step, in seconds")
    parser.add_argument("--dir", type=Path, default=Path("checkpoints"))
    args = parser.parse_args()

    set_seed(1)
    config = GPT2Config(vocab_size=256, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(args.dir),
            use_cpu=True,
            max_steps=args.steps,
            per_device_train_batch_size=4,
            learning_rate=0.01,
            logging_steps=1,
            save_steps=args.save_every,
            save_total_limit=2,
            report_to="none",
            disable_tqdm=True,
            seed=1,
        ),
        train_dataset=Windows(Path(__file__).read_bytes(), 32),
        callbacks=[Slow(args.step_s)],
    )
    trainer.train(resume_from_checkpoint=newest_whole(args.dir))
    weights = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
    if trainer.is_world_process_zero():
        print(f"weights {hashlib.sha256(weights).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
