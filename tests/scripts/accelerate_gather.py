"""Accelerate as its manual shows it; the launcher is found from the environment."""

import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
gathered = accelerator.gather(torch.tensor([accelerator.process_index + 1]))
assert gathered.tolist() == [1, 2], gathered
print(f"rank {accelerator.process_index} of {accelerator.num_processes} gathered {gathered.tolist()}")
accelerator.end_training()
