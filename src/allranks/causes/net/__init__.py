"""Family 2, the network: `reach` (who finds whom), `link` (does anything pass), `forced`, `naming`, `packets`."""
