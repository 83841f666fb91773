"""Training. Objectives, optimizers and schedules need only torch. The module, the callbacks and ``run`` need lightning.

This file imports nothing, so that ``minitx.training.objectives`` can be imported without lightning.
"""
