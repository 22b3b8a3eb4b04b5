"""Family 1, the GPUs: `driver` (does CUDA start), `binding` (which GPU is whose), `hardware` (is it well)."""
