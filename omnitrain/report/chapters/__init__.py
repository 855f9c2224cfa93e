"""The chapters of a report: each takes the runs and returns HTML."""
