"""Report: rows -> one offline page, or Markdown. It selects and scales units; it computes nothing."""
