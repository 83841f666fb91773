"""The lab: run a grid of training runs, judge the results and write a report."""
