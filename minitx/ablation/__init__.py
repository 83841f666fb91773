"""The lab: it runs a grid of training runs, judges it and writes a report."""
