"""Reports: render the analysis of a run as one offline HTML page or as Markdown.

Modules here select, format and draw numbers; dpbench.analysis computes them.
"""
