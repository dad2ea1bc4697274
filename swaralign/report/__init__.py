"""The comparison as people read it: Markdown, and one HTML page."""
