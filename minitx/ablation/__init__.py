"""The lab: a grid of training runs, how it is judged, and its report."""
