"""What each part of a model costs, and how the cost of one layer grows with the length of the row. Nothing is timed.

Operations are those of matrix products, in millions. ``formula``: what exact attention needs, with the keys that a query sees.
``forward`` and ``backward``: what was counted. ``kept``: bytes that wait for the backward pass.

    python examples/cost.py        # half a minute; writes cost.png
"""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler, which counts the bytes, prints messages otherwise

from minitx.analysis import save_figure
from minitx.analysis.cost import GROWTHS, example_inputs, growth, growth_figure, ledger
from minitx.config import TransformerConfig
from minitx.nn import DecoderLM

CONFIG = TransformerConfig(vocab_size=256, embed_dim=128, num_heads=4, num_layers=4, max_len=256)


def main(config: TransformerConfig = CONFIG, lengths: tuple[int, ...] = (256, 512, 1024, 2048), path: str = "cost.png"):
    """Print both tables, draw the figure, and return the parts and the growths."""
    parts = ledger(DecoderLM(config), example_inputs(config, batch_size=1, length=config.max_len))
    print(f"{'part':<12}{'parameters':>12}{'formula':>10}{'forward':>10}{'backward':>10}{'kept':>14}")
    for part in parts:
        counted = "".join(f"{value / 1e6:>10,.1f}" for value in (part.formula, part.forward, part.backward))
        print(f"{part.name:<12}{part.parameters:>12,}{counted}{part.kept:>14,}")

    shape = {"num_heads": config.num_heads, "head_dim": config.width_per_head}
    curves = [growth(kind, lengths, **shape) for kind in GROWTHS]
    print(f"\n{'one layer':<14}{'textbook':>16}{'counted':>18}")
    for curve in curves:
        fitted = " and ".join(f"n^{exponent:.2f}" for exponent in curve.exponents)
        print(f"{curve.kind:<14}{' and '.join(GROWTHS[curve.kind]):>16}{fitted:>18}")
    save_figure(growth_figure(curves), path)
    return parts, curves


if __name__ == "__main__":
    main()
