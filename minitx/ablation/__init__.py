"""The lab: a grid of training runs, how it is run, how it is judged, and the page that reports it.

``statistics`` holds the tests and the verdict rule, ``analysis`` turns records of cells into tables, ``verdict``
compares arms and judges the predictions, ``figures`` draws, ``page`` lays out the HTML, and ``report.write_report``
writes everything into one folder. Importing this package imports nothing else.
"""
