"""A run's folder: its lock, what is saved, and how it resumes."""
