"""Trainers of a voice policy, and what they share."""
