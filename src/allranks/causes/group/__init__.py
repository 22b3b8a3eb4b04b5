"""Family 4, the group: `arrival` (who comes), `behind` (who is waited for), `agree`, `death`, `store`, `timeout`."""
