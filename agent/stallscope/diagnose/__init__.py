"""Conclusions drawn from state. Never reads a clock."""
