"""Data: text and synthetic tasks as addressed batches, tokenizers, and the Lightning data module that serves them.

``minitx.data.module.build_data`` is the way in. Importing this package imports nothing else.
"""
