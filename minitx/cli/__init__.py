"""The programs, one module each, and their common parts. Only this package imports hydra and omegaconf."""
