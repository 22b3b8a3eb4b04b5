"""Family 6, state: `checkpoint` (can it be read), `elastic` (does it go on), `storage` (files), `loss` (numbers)."""
