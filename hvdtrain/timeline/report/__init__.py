"""Reports of an analysis: text, JSON, HTML page, conditions, comparison of two runs."""
