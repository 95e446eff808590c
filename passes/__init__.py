"""Rewrites of the graph, one a file, and what runs, proves and bisects them."""
