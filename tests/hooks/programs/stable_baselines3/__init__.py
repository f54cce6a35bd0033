"""A stand-in with the shape of Stable-Baselines3: what the hooks touch, and no torch."""
