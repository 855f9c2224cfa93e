"""The command line: ``omnitrain VERB``."""
