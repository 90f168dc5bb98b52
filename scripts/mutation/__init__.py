"""Plants single faults in mpikv and notes which tier of the tests notices each: see scripts/mutants."""
