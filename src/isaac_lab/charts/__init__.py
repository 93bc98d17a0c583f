"""Charts: one description, Vega-Lite, drawn to a file and shown on the page with its controls."""
