"""The site of the documents, which `make docs` builds in build/site."""

project = "dpbench"
html_title = "dpbench"
extensions = ["myst_parser"]
myst_heading_anchors = 3
html_theme = "furo"
html_show_copyright = False
html_show_sphinx = False
exclude_patterns = ["images/*.md"]
