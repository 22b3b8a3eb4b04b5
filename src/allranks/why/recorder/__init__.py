"""The flight recorder's dumps: which collective each rank was in."""
