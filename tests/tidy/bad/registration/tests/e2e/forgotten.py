"""Runs nowhere."""
