"""The live dashboard: pure drawings of a run's view, and the Textual app that shows them.

Textual is imported nowhere else in ft_insight, and nothing here needs torch or transformers.
"""
