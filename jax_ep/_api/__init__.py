"""What users call: arguments, checks, docstrings."""
