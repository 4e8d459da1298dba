"""Benchmarks of attnlib. Each writes a JSON file into benchmarks/results; benchmarks.table makes the tables of them."""
