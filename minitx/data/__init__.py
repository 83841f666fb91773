"""Data: texts, pairs, classes, images and synthetic tasks as addressed batches, tokenizers, and the Lightning data module.

Start with ``minitx.data.module.build_data``. Importing this package imports nothing else.
"""
