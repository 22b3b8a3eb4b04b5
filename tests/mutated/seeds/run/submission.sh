#!/bin/bash
#SBATCH --job-name="gpt run"
#SBATCH --nodes=2
srun allranks run train.py
