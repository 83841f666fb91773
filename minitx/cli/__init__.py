"""The programs: one module each, and what they share. The only room that knows hydra and omegaconf."""
