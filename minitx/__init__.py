"""minitx: a minimal trainable Transformer framework.

``minitx.nn`` contains the blocks and needs only torch. ``minitx.training`` trains models, and ``minitx.ablation`` compares
them. Importing this package imports nothing else.
"""

__version__ = "0.2.0"
