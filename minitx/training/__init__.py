"""Training: objectives, optimizers and schedules need torch alone; the module, callbacks and ``run`` need lightning.

Imports nothing itself, so that ``minitx.training.objectives`` stays light.
"""
