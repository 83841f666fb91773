"""minitx: a minimal trainable Transformer framework.

``minitx.nn`` holds the blocks and needs torch alone; ``minitx.training`` trains them; ``minitx.ablation`` asks
questions of them. Importing this package imports nothing else.
"""

__version__ = "0.1.0"
