"""The lab: a grid of training runs, how it is run, how it is judged, and the page that reports it.

Planning and running: ``grid``, ``runner``, ``launchers`` (where cells run), ``progress``. Judging, each on top of the one before: ``statistics`` holds the tests and the
verdict rule, ``records`` counts what came back and scores it, ``effects`` pairs two arms seed by seed, ``tables`` has one
table a study, ``verdict`` compares the arms, ``predictions`` judges what was written down before, ``published`` what others
have said. Reporting: ``sections`` and ``page`` say it in words and tables, ``figures``, ``design_figures`` and
``probe_figures`` draw, ``render`` makes HTML, Markdown and text, and
``report.write_report`` writes everything into one folder. Importing this package imports nothing else.
"""
