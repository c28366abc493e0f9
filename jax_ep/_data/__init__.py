"""What all rooms need: arguments, sizes, plans, ranks. Imports nothing above it."""
