"""Measuring on purpose: batch sizes until memory ends, or a few steps on another machine."""
