"""Data: texts, pairs, classes, images and synthetic tasks as addressed batches, tokenizers, and the Lightning data module.

``minitx.data.module.build_data`` is the way in. Importing this package imports nothing else.
"""
