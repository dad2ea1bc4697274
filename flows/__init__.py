"""Prefect over DVC's graph: runs it where people can see, schedule and stop it. Holds no second graph."""
