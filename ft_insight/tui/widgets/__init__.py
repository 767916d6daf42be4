"""Drawings (pure functions of a frame and a size) and the few widgets that put them on the screen."""
